//! PURE. One judgement of a stripped line: which record it holds, of what kind, and whether history shows it. The first
//! scan counts by it and a page builds by it, so that `total` is exact.
//!
//! Leaves the shown values to `entry`. Rule a change could break: the blocks of a message are walked in one place
//! ([`walk_blocks`]), in document order, by the count, the references and the look-up of a photo alike.

use std::borrow::Cow;

use memchr::memmem;

use super::json::{Bad, Cursor, Next, Str};
use super::sniff::Sniff;
use super::strip::Cut;
use crate::ids::{ID_BYTES_MAX, is_plain_id};

/// What a record is to history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Words or photos of a person.
    User = 0,
    /// Words, thoughts or calls of the agent.
    Assistant = 1,
    /// The summary that a compaction left.
    Compaction = 2,
    /// The agent was interrupted here.
    Interrupted = 3,
    /// A user line that no person wrote.
    Notice = 4,
    /// Only results of tools: shown on their calls.
    Result = 5,
    /// Part of the file, not of the conversation.
    Hidden = 6,
    /// A conversation line without readable content.
    Unreadable = 7,
}

impl Kind {
    /// From its number.
    #[must_use]
    pub fn from_number(n: u8) -> Self {
        match n {
            0 => Kind::User,
            1 => Kind::Assistant,
            2 => Kind::Compaction,
            3 => Kind::Interrupted,
            4 => Kind::Notice,
            5 => Kind::Result,
            7 => Kind::Unreadable,
            _ => Kind::Hidden,
        }
    }

    /// True for what becomes an entry.
    #[must_use]
    pub fn is_entry(self) -> bool {
        match self {
            Kind::User | Kind::Assistant | Kind::Compaction | Kind::Interrupted | Kind::Notice => true,
            Kind::Result | Kind::Hidden | Kind::Unreadable => false,
        }
    }
}

/// The base64 source of a photo.
#[derive(Debug, Clone, Copy, Default)]
pub struct Source<'a> {
    /// `media_type`, if it is a text.
    pub media_type: Option<Str<'a>>,
    /// `data`, if it is a text.
    pub data: Option<Str<'a>>,
    /// `url`, if it is a text.
    pub url: Option<Str<'a>>,
}

/// One block of a message, values unread.
#[derive(Debug, Clone, Copy, Default)]
pub struct BlockRef<'a> {
    /// `type`; none for a bare text.
    pub kind: Option<Str<'a>>,
    /// `text`, or the bare text.
    pub text: Option<Str<'a>>,
    /// `thinking`.
    pub thinking: Option<Str<'a>>,
    /// `source`.
    pub source: Option<Source<'a>>,
    /// `name` of a tool.
    pub name: Option<Str<'a>>,
    /// `id` of a call.
    pub id: Option<Str<'a>>,
    /// `tool_use_id` of a result.
    pub tool_use_id: Option<Str<'a>>,
    /// Where `input` starts.
    pub input_at: Option<usize>,
    /// Where `content` of a result starts.
    pub content_at: Option<usize>,
    /// Which photo of the message it is, if it is one.
    pub image: Option<usize>,
}

impl BlockRef<'_> {
    fn is(&self, kind: &[u8]) -> bool {
        self.kind.is_some_and(|k| k.is(kind))
    }

    /// True for a photo with a payload of our own to serve.
    #[must_use]
    pub fn has_payload(&self, cuts: &[Cut]) -> bool {
        self.source.and_then(|s| s.data).is_some_and(|d| !d.is_empty(cuts))
    }
}

/// Walks the content that the cursor stands at: a text, one block, or a list of them. Leaves the cursor behind it.
///
/// # Errors
/// It cannot be read.
pub fn walk_blocks<'a>(cursor: &mut Cursor<'a>, mut each: impl FnMut(BlockRef<'a>)) -> Result<(), Bad> {
    let mut images = 0;
    let mut one = |cursor: &mut Cursor<'a>| -> Result<(), Bad> {
        match cursor.peek()? {
            Next::String => {
                each(BlockRef { text: Some(cursor.string()?), ..BlockRef::default() });
                Ok(())
            }
            Next::Object => {
                let mut block = block(cursor)?;
                if block.is(b"image") {
                    block.image = Some(images);
                    images += 1;
                }
                each(block);
                Ok(())
            }
            Next::Array | Next::Scalar => cursor.skip(),
        }
    };
    match cursor.peek()? {
        Next::Array => {
            if cursor.enter()? {
                loop {
                    one(cursor)?;
                    if !cursor.more(b']')? {
                        break;
                    }
                }
            }
            Ok(())
        }
        Next::String | Next::Object | Next::Scalar => one(cursor),
    }
}

fn block<'a>(cursor: &mut Cursor<'a>) -> Result<BlockRef<'a>, Bad> {
    let mut block = BlockRef::default();
    if !cursor.enter()? {
        return Ok(block);
    }
    loop {
        let key = cursor.key()?;
        match key.raw {
            b"type" => block.kind = cursor.string_or_skip()?,
            b"text" => block.text = cursor.string_or_skip()?,
            b"thinking" => block.thinking = cursor.string_or_skip()?,
            b"name" => block.name = cursor.string_or_skip()?,
            b"id" => block.id = cursor.string_or_skip()?,
            b"tool_use_id" => block.tool_use_id = cursor.string_or_skip()?,
            b"source" => block.source = source(cursor)?,
            b"input" => {
                cursor.blanks();
                block.input_at = Some(cursor.at);
                cursor.skip()?;
            }
            b"content" => {
                cursor.blanks();
                block.content_at = Some(cursor.at);
                cursor.skip()?;
            }
            _ => cursor.skip()?,
        }
        if !cursor.more(b'}')? {
            return Ok(block);
        }
    }
}

fn source<'a>(cursor: &mut Cursor<'a>) -> Result<Option<Source<'a>>, Bad> {
    if cursor.peek()? != Next::Object {
        cursor.skip()?;
        return Ok(None);
    }
    let mut source = Source::default();
    if cursor.enter()? {
        loop {
            let key = cursor.key()?;
            match key.raw {
                b"media_type" => source.media_type = cursor.string_or_skip()?,
                b"data" => source.data = cursor.string_or_skip()?,
                b"url" => source.url = cursor.string_or_skip()?,
                _ => cursor.skip()?,
            }
            if !cursor.more(b'}')? {
                break;
            }
        }
    }
    Ok(Some(source))
}

/// What the content of a message is made of.
#[derive(Debug, Clone, Copy, Default)]
pub struct Content<'a> {
    /// Where it starts in the stripped line.
    pub at: usize,
    /// Blocks that are shown.
    pub shown: u32,
    /// The text of the only shown block, if it is a text.
    pub sole_text: Option<Str<'a>>,
    /// Photos, failed ones too.
    pub images: u32,
    /// Results of tools.
    pub results: u32,
    /// Calls of tools.
    pub tools: u32,
    /// Thoughts.
    pub thoughts: u32,
}

fn content<'a>(cursor: &mut Cursor<'a>, cuts: &[Cut]) -> Result<Option<Content<'a>>, Bad> {
    if cursor.peek()? == Next::Scalar {
        cursor.skip()?;
        return Ok(None);
    }
    let mut content = Content { at: cursor.at, ..Content::default() };
    walk_blocks(cursor, |block| {
        content.images += u32::from(block.image.is_some());
        match role(&block, cuts) {
            Role::Nothing => return,
            Role::Result => {
                content.results += 1;
                return;
            }
            Role::Text(text) if content.shown == 0 => content.sole_text = Some(text),
            Role::Call => {
                content.tools += 1;
                content.sole_text = None;
            }
            Role::Thought(_) => {
                content.thoughts += 1;
                content.sole_text = None;
            }
            Role::Text(_) | Role::Photo | Role::Unknown => content.sole_text = None,
        }
        content.shown += 1;
    })?;
    Ok(Some(content))
}

/// What a block is to history.
#[derive(Debug, Clone, Copy)]
pub enum Role<'a> {
    /// Not shown.
    Nothing,
    /// Words.
    Text(Str<'a>),
    /// A thought.
    Thought(Str<'a>),
    /// A call of a tool.
    Call,
    /// A result of a tool, shown on its call.
    Result,
    /// A photo, failed or not.
    Photo,
    /// Something of a kind that nobody knows.
    Unknown,
}

/// Judges one block.
#[must_use]
pub fn role<'a>(block: &BlockRef<'a>, cuts: &[Cut]) -> Role<'a> {
    let Some(kind) = block.kind else {
        return match block.text {
            Some(text) if is_shown(text, cuts) => Role::Text(text),
            Some(_) | None => Role::Nothing,
        };
    };
    match kind.raw {
        b"text" => match block.text {
            Some(text) if is_shown(text, cuts) => Role::Text(text),
            Some(_) | None => Role::Nothing,
        },
        b"thinking" => match block.thinking {
            Some(text) if text.raw.iter().any(|b| !b.is_ascii_whitespace()) || !text.is_empty(cuts) => {
                Role::Thought(text)
            }
            Some(_) | None => Role::Nothing,
        },
        b"tool_use" => Role::Call,
        b"tool_result" => Role::Result,
        b"image" => Role::Photo,
        _ => Role::Unknown,
    }
}

/// True if something of `text` is left for a person to read.
fn is_shown(text: Str<'_>, cuts: &[Cut]) -> bool {
    match text.raw.first() {
        None => !text.is_empty(cuts),
        // Only these can begin what is not shown: a blank (escaped or not), a tag, `Tool loaded.`
        Some(b'\\' | b' ' | b'\t' | b'<' | b'T' | b'\n' | b'\r') => !shown_text(&text.text(cuts)).trim().is_empty(),
        Some(_) => match memmem::find(text.raw, CHAT_APP.as_bytes()) {
            None => true,
            Some(_) => !shown_text(&text.text(cuts)).trim().is_empty(),
        },
    }
}

/// How older agents tell of a finished task: without an `origin`.
const TASK_NOTE: &[u8] = b"<task-notification>";
const CHAT_APP: &str = "<chat-app";
/// Texts that a program put where a person's words stand.
const PLUMBING: &[&str] = &["Tool loaded."];
/// Tags of which the same is true, if nothing stands outside of them.
const PLUMBING_TAGS: &[&str] = &[
    "system-reminder",
    "local-command-stdout",
    "local-command-stderr",
    "local-command-caveat",
    "command-name",
    "command-message",
    "command-args",
    "command-contents",
];

/// `text` without what the server or the agent put in: our `<chat-app>` tags always, plumbing if it is all there is.
#[must_use]
pub fn shown_text(text: &str) -> Cow<'_, str> {
    let text = without_chat_app(text);
    let bare = text.trim();
    if PLUMBING.contains(&bare) || is_only_plumbing_tags(bare) {
        return Cow::Borrowed("");
    }
    text
}

fn is_only_plumbing_tags(mut text: &str) -> bool {
    if text.is_empty() {
        return false;
    }
    while !text.is_empty() {
        let Some(rest) = text.strip_prefix('<') else {
            return false;
        };
        let Some(tag) = PLUMBING_TAGS.iter().find(|t| rest.strip_prefix(**t).is_some_and(|r| r.starts_with('>')))
        else {
            return false;
        };
        let close = format!("</{tag}>");
        let Some(end) = rest.find(&close) else {
            return false;
        };
        text = rest[end + close.len()..].trim_start();
    }
    true
}

/// Where `tag` begins, in whatever case it is written.
fn find_tag(text: &str, tag: &str) -> Option<usize> {
    let is_tag =
        |at: usize| text.as_bytes().get(at..at + tag.len()).is_some_and(|t| t.eq_ignore_ascii_case(tag.as_bytes()));
    text.match_indices('<').map(|(at, _)| at).find(|at| is_tag(*at))
}

/// `text` without our `<chat-app …/>` and `<chat-app …>…</chat-app>`; one that does not end stays.
#[must_use]
pub fn without_chat_app(text: &str) -> Cow<'_, str> {
    const CLOSE: &str = "</chat-app>";
    let mut out = String::new();
    let mut rest = text;
    let mut found = false;
    let mut from = 0;
    while let Some(start) = find_tag(&rest[from..], CHAT_APP).map(|n| n + from) {
        let after = &rest[start + CHAT_APP.len()..];
        // Not `<chat-apple>`.
        let named = after.starts_with(|c: char| c.is_whitespace() || c == '>' || c == '/');
        let len = match after.find('>') {
            Some(end) if named && after[..end].ends_with('/') => Some(end + 1),
            Some(_) if named => find_tag(after, CLOSE).map(|end| end + CLOSE.len()),
            Some(_) | None => None,
        };
        let Some(len) = len else {
            from = start + CHAT_APP.len();
            continue;
        };
        found = true;
        out.push_str(&rest[..start]);
        rest = &after[len..];
        from = 0;
    }
    if !found {
        return Cow::Borrowed(text);
    }
    out.push_str(rest);
    Cow::Owned(out.trim().to_owned())
}

/// True for the two markers that an interrupt leaves.
#[must_use]
pub fn is_interrupt_marker(text: &str) -> bool {
    matches!(text.trim(), "[Request interrupted by user]" | "[Request interrupted by user for tool use]")
}

/// One record, judged.
#[derive(Debug, Clone)]
pub struct Record<'a> {
    /// What it is to history.
    pub kind: Kind,
    /// `uuid`, if it is a text.
    pub uuid: Option<Str<'a>>,
    /// `timestamp`, if it is a text.
    pub timestamp: Option<Str<'a>>,
    /// Its content, if readable.
    pub content: Option<Content<'a>>,
    /// `message.stop_reason`.
    pub stop_reason: Option<Str<'a>>,
    /// Where `mergedSendUuids` starts.
    pub merged_at: Option<usize>,
    /// `attachment.source_uuid`.
    pub source_uuid: Option<Str<'a>>,
    /// `cwd`, if it is a text.
    pub cwd: Option<Str<'a>>,
    /// Belongs to a side chain, not to the conversation itself.
    pub sidechain: bool,
    /// Its content is that of a `message`, so its photos can be referred to.
    pub in_message: bool,
    /// Where it starts in the stripped line.
    pub start: usize,
    /// Where it ends in the stripped line.
    pub end: usize,
}

impl Record<'_> {
    /// Its uuid, if it has one that is an id.
    #[must_use]
    pub fn plain_uuid(&self) -> Option<Cow<'_, str>> {
        self.uuid.and_then(|u| u.short(ID_BYTES_MAX)).filter(|u| is_plain_id(u))
    }

    /// Every id under which a message of ours can be in this record.
    #[must_use]
    pub fn ids(&self, line: &[u8]) -> Vec<String> {
        let mut ids: Vec<String> = Vec::new();
        let mut push = |id: Option<Str<'_>>| {
            if let Some(id) = id.and_then(|i| i.short(ID_BYTES_MAX)) {
                ids.push(id.into_owned());
            }
        };
        push(self.uuid);
        push(self.source_uuid);
        if let Some(at) = self.merged_at {
            let mut cursor = Cursor::new(line, at);
            // The line was read whole before, so this can only end early if the value is no list of texts.
            let _ = walk_blocks(&mut cursor, |b| push(b.text));
        }
        ids
    }
}

/// True for line kinds that can be part of the conversation.
#[must_use]
pub fn is_conversation(kind: &[u8]) -> bool {
    matches!(kind, b"user" | b"assistant" | b"attachment")
}

/// Reads the record that starts at `at` of a stripped line.
///
/// # Errors
/// It is no whole object, or too deep.
pub fn read<'a>(line: &'a [u8], cuts: &[Cut], at: usize) -> Result<Record<'a>, Bad> {
    let mut cursor = Cursor::new(line, at);
    if cursor.peek()? != Next::Object {
        return Err(Bad::Syntax(cursor.at));
    }
    let start = cursor.at;
    let mut top = Top::default();
    if cursor.enter()? {
        loop {
            let key = cursor.key()?;
            top.member(key, &mut cursor, cuts)?;
            if !cursor.more(b'}')? {
                break;
            }
        }
    }
    let kind = top.judge(cuts);
    Ok(Record {
        kind,
        uuid: top.uuid,
        timestamp: top.timestamp,
        content: if top.is(b"attachment") { top.attachment.prompt } else { top.message.content },
        stop_reason: top.message.stop_reason,
        merged_at: top.merged_at,
        source_uuid: top.attachment.source_uuid,
        cwd: top.cwd,
        sidechain: top.sidechain,
        in_message: !top.is(b"attachment"),
        start,
        end: cursor.at,
    })
}

#[derive(Default)]
struct Message<'a> {
    content: Option<Content<'a>>,
    model: Option<Str<'a>>,
    stop_reason: Option<Str<'a>>,
}

#[derive(Default)]
struct Attachment<'a> {
    kind: Option<Str<'a>>,
    prompt: Option<Content<'a>>,
    mode: Option<Str<'a>>,
    source_uuid: Option<Str<'a>>,
    meta: bool,
}

#[derive(Default)]
struct Top<'a> {
    kind: Option<Str<'a>>,
    uuid: Option<Str<'a>>,
    timestamp: Option<Str<'a>>,
    cwd: Option<Str<'a>>,
    meta: bool,
    sidechain: bool,
    compact: bool,
    api_error: bool,
    origin: bool,
    message: Message<'a>,
    attachment: Attachment<'a>,
    merged_at: Option<usize>,
}

impl<'a> Top<'a> {
    fn is(&self, kind: &[u8]) -> bool {
        self.kind.is_some_and(|k| k.is(kind))
    }

    fn member(&mut self, key: Str<'a>, cursor: &mut Cursor<'a>, cuts: &[Cut]) -> Result<(), Bad> {
        match key.raw {
            b"type" => self.kind = cursor.string_or_skip()?,
            b"uuid" => self.uuid = cursor.string_or_skip()?,
            b"timestamp" => self.timestamp = cursor.string_or_skip()?,
            b"cwd" => self.cwd = cursor.string_or_skip()?,
            b"isMeta" => self.meta = cursor.is_true()?,
            b"isSidechain" => self.sidechain = cursor.is_true()?,
            b"isCompactSummary" => self.compact = cursor.is_true()?,
            b"isApiErrorMessage" => self.api_error = cursor.is_true()?,
            b"origin" => self.origin = origin(cursor)?,
            b"message" => self.message = message(cursor, cuts)?,
            b"attachment" => self.attachment = attachment(cursor, cuts)?,
            b"mergedSendUuids" => {
                cursor.blanks();
                self.merged_at = Some(cursor.at);
                cursor.skip()?;
            }
            _ => cursor.skip()?,
        }
        Ok(())
    }

    fn judge(&self, cuts: &[Cut]) -> Kind {
        let Some(kind) = self.kind else {
            return Kind::Unreadable;
        };
        let content = match kind.raw {
            b"user" | b"assistant" => self.message.content,
            b"attachment" if self.attachment.kind.is_some_and(|k| k.is(b"queued_command")) => self.attachment.prompt,
            _ => return Kind::Hidden,
        };
        let facts = Facts {
            line: if kind.is(b"user") {
                LineKind::User
            } else if kind.is(b"assistant") {
                LineKind::Assistant
            } else {
                LineKind::Queued
            },
            sidechain: self.sidechain,
            meta: self.meta || self.attachment.meta,
            compact: self.compact,
            synthetic: self.message.model.is_some_and(|m| m.is(b"<synthetic>")),
            api_error: self.api_error,
            by_nobody: self.origin
                || content.and_then(|c| c.sole_text).is_some_and(|t| t.raw.starts_with(TASK_NOTE))
                || self.attachment.mode.is_some_and(|m| !m.is(b"prompt")) && kind.is(b"attachment"),
            readable: content.is_some(),
            shown: content.is_some_and(|c| c.shown > 0),
            results: content.is_some_and(|c| c.results > 0),
            interrupt: content
                .and_then(|c| c.sole_text)
                .filter(|t| t.raw.len() < 200)
                .is_some_and(|t| is_interrupt_marker(&t.text(cuts))),
        };
        facts.judge()
    }
}

enum LineKind {
    User,
    Assistant,
    Queued,
}

struct Facts {
    line: LineKind,
    sidechain: bool,
    meta: bool,
    compact: bool,
    synthetic: bool,
    api_error: bool,
    by_nobody: bool,
    readable: bool,
    shown: bool,
    results: bool,
    interrupt: bool,
}

impl Facts {
    fn judge(&self) -> Kind {
        if self.sidechain {
            return Kind::Hidden;
        }
        if !self.readable {
            return if self.meta { Kind::Hidden } else { Kind::Unreadable };
        }
        match self.line {
            LineKind::Assistant => {
                let hidden = self.meta || (self.synthetic && !self.api_error) || !self.shown;
                if hidden { Kind::Hidden } else { Kind::Assistant }
            }
            LineKind::User | LineKind::Queued => {
                if self.compact && self.shown {
                    Kind::Compaction
                } else if self.meta {
                    Kind::Hidden
                } else if !self.shown {
                    if self.results { Kind::Result } else { Kind::Hidden }
                } else if self.by_nobody {
                    Kind::Notice
                } else if self.interrupt {
                    Kind::Interrupted
                } else {
                    Kind::User
                }
            }
        }
    }
}

/// The same judgement for a line that could only be sniffed.
#[must_use]
pub fn judge_sniffed(sniff: &Sniff) -> Kind {
    let line = match &sniff.kind[..] {
        b"user" => LineKind::User,
        b"assistant" => LineKind::Assistant,
        b"attachment" if sniff.queued_command => LineKind::Queued,
        _ => return Kind::Hidden,
    };
    let queued = matches!(line, LineKind::Queued);
    Facts {
        line,
        sidechain: sniff.sidechain,
        meta: sniff.meta,
        compact: sniff.compact,
        synthetic: sniff.synthetic,
        api_error: sniff.api_error,
        by_nobody: sniff.origin || (queued && sniff.other_mode),
        readable: queued || sniff.message,
        shown: queued || sniff.others || !sniff.results,
        results: sniff.results,
        interrupt: false,
    }
    .judge()
}

/// True for an origin that is somebody other than the person.
fn origin(cursor: &mut Cursor<'_>) -> Result<bool, Bad> {
    match cursor.peek()? {
        Next::Scalar => Ok(cursor.scalar()? != b"null"),
        Next::String => Ok(!cursor.string()?.is(b"human")),
        Next::Array => cursor.skip().map(|()| true),
        Next::Object => {
            let mut other = true;
            if cursor.enter()? {
                loop {
                    if cursor.key()?.is(b"kind") {
                        other = !cursor.string_or_skip()?.is_some_and(|k| k.is(b"human"));
                    } else {
                        cursor.skip()?;
                    }
                    if !cursor.more(b'}')? {
                        break;
                    }
                }
            }
            Ok(other)
        }
    }
}

fn message<'a>(cursor: &mut Cursor<'a>, cuts: &[Cut]) -> Result<Message<'a>, Bad> {
    let mut message = Message::default();
    if cursor.peek()? != Next::Object {
        cursor.skip()?;
        return Ok(message);
    }
    if cursor.enter()? {
        loop {
            match cursor.key()?.raw {
                b"content" => message.content = content(cursor, cuts)?,
                b"model" => message.model = cursor.string_or_skip()?,
                b"stop_reason" => message.stop_reason = cursor.string_or_skip()?,
                _ => cursor.skip()?,
            }
            if !cursor.more(b'}')? {
                break;
            }
        }
    }
    Ok(message)
}

fn attachment<'a>(cursor: &mut Cursor<'a>, cuts: &[Cut]) -> Result<Attachment<'a>, Bad> {
    let mut attachment = Attachment::default();
    if cursor.peek()? != Next::Object {
        cursor.skip()?;
        return Ok(attachment);
    }
    if cursor.enter()? {
        loop {
            match cursor.key()?.raw {
                b"type" => attachment.kind = cursor.string_or_skip()?,
                b"prompt" => attachment.prompt = content(cursor, cuts)?,
                b"commandMode" => attachment.mode = cursor.string_or_skip()?,
                b"source_uuid" => attachment.source_uuid = cursor.string_or_skip()?,
                b"isMeta" => attachment.meta = cursor.is_true()?,
                _ => cursor.skip()?,
            }
            if !cursor.more(b'}')? {
                break;
            }
        }
    }
    Ok(attachment)
}

/// One step of [`split`].
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "one at a time, on the stack, and mostly records")]
pub enum Part<'a> {
    /// A whole record.
    Record(Record<'a>),
    /// Something unreadable before a record or at the end.
    Gap,
    /// A whole record that is nested too deep to read; its stripped bytes from here on.
    Deep(usize),
}

/// Most bytes read again while looking for a record behind a torn one, per line.
const RETRY_BYTES_MAX: usize = 4 * 1024 * 1024;

/// Finds every whole record of a stripped line: normally one, two if two were written on one line, the second if the
/// first was torn, none if it is no record at all.
pub fn split<'a>(line: &'a [u8], cuts: &[Cut], from: usize, mut each: impl FnMut(Part<'a>)) {
    let mut at = from;
    let mut budget = RETRY_BYTES_MAX;
    let mut first = true;
    loop {
        while let Some(b' ' | b'\t' | b'\r' | b'\n' | 0xef | 0xbb | 0xbf) = line.get(at) {
            at += 1;
        }
        if at >= line.len() {
            return;
        }
        match read(line, cuts, at) {
            Ok(record) => {
                at = record.end;
                each(Part::Record(record));
            }
            Err(Bad::Deep) => {
                // Only a line of one record is looked into by the sniffer.
                each(if first { Part::Deep(at) } else { Part::Gap });
                return;
            }
            Err(Bad::Syntax(stop)) => {
                each(Part::Gap);
                match next_record(line, cuts, at, stop, &mut budget) {
                    Some(next) => at = next,
                    None => return,
                }
            }
        }
        first = false;
    }
}

/// Where a whole conversation record starts in the end of a line of another kind, among the places that `may` allows.
#[must_use]
pub fn next_alone(line: &[u8], cuts: &[Cut], may: impl Fn(usize) -> bool) -> Option<usize> {
    let mut budget = RETRY_BYTES_MAX;
    memmem::find_iter(line, b"{\"").find(|n| may(*n) && stands_alone(line, cuts, *n, &mut budget))
}

/// Where a whole conversation record starts behind what was torn at `at` and stopped making sense at `stop`.
fn next_record(line: &[u8], cuts: &[Cut], at: usize, stop: usize, budget: &mut usize) -> Option<usize> {
    // A line torn inside a text stops making sense right behind the `{"` of the record glued to it.
    let near = memmem::rfind(&line[at..stop.min(line.len())], b"{\"").map(|n| at + n).filter(|n| *n > at);
    if let Some(near) = near
        && stands_alone(line, cuts, near, budget)
    {
        return Some(near);
    }
    memmem::find_iter(&line[at + 1..], b"{\"").map(|n| at + 1 + n).find(|n| stands_alone(line, cuts, *n, budget))
}

/// True if a whole record of the conversation starts at `at` and nothing but another one follows it.
fn stands_alone(line: &[u8], cuts: &[Cut], at: usize, budget: &mut usize) -> bool {
    if *budget == 0 {
        return false;
    }
    match read(line, cuts, at) {
        Ok(record) => {
            *budget = budget.saturating_sub(record.end - at);
            let mut cursor = Cursor::new(line, record.end);
            cursor.blanks();
            matches!(line.get(cursor.at), None | Some(b'{')) && record.kind != Kind::Unreadable && has_kind(line, at)
        }
        Err(Bad::Syntax(stop)) => {
            *budget = budget.saturating_sub(stop.saturating_sub(at).max(1));
            false
        }
        Err(Bad::Deep) => {
            *budget = 0;
            false
        }
    }
}

fn has_kind(line: &[u8], at: usize) -> bool {
    let mut cursor = Cursor::new(line, at);
    let mut found = false;
    let mut walk = || -> Result<(), Bad> {
        if cursor.enter()? {
            loop {
                if cursor.key()?.is(b"type") {
                    found = cursor.string_or_skip()?.is_some_and(|k| is_conversation(k.raw));
                } else {
                    cursor.skip()?;
                }
                if !cursor.more(b'}')? {
                    break;
                }
            }
        }
        Ok(())
    };
    let _ = walk();
    found
}
