//! The script language of the embedded agent: `{{KEY=VALUE …}}` anywhere in a text. Pure: a text in, the words without
//! its directives and a [`Script`] out. Rule a change could break: a brace pair that is not wholly made of known keys is
//! a person's text and stays as it is.

/// Largest answer that `size` or `flood` makes, in bytes: what a test asks for must not take the machine down.
const ANSWER_BYTES_MAX: usize = 256 * 1024 * 1024;

/// Where a turn's process dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Die {
    /// After the init and the user line, before any delta.
    Before,
    /// After half of the deltas.
    Mid,
    /// Right after the result.
    After,
}

/// What becomes of a uuid that the session holds already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dedup {
    /// Not run again; told once as `command_lifecycle completed` if an earlier process ran it (2.1.332).
    Told,
    /// Not run again, and not a word about it (2.1.197).
    Silent,
    /// Run again.
    Off,
}

/// What an interrupt meets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Interrupts {
    /// The turn ends.
    #[default]
    Obeyed,
    /// No answer, no effect.
    Ignored,
    /// The request is answered with success, the turn goes on.
    OnlyAnswered,
}

/// How the line that starts a background turn fares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OwnTurn {
    /// It waits and is a turn of its own afterwards.
    Queue,
    /// It is folded into the background turn.
    Fold,
}

/// What a text asks the agent to do. `None` and zero: as it would without.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Script {
    pub delay_ms: u64,
    pub init_ms: u64,
    pub deltas: Option<u64>,
    pub delta_ms: u64,
    pub size: Option<usize>,
    pub think: Option<String>,
    pub tool: Option<String>,
    pub tool_ms: u64,
    pub ask: bool,
    pub error: Option<String>,
    pub hang: bool,
    pub die: Option<Die>,
    pub interrupts: Option<Interrupts>,
    pub ignore_sigterm: bool,
    pub bg_ms: Option<u64>,
    pub flush_ms: Option<i64>,
    pub torn: bool,
    pub dedup: Option<Dedup>,
    pub keep_uuid: Option<bool>,
    pub user_flush_ms: Option<u64>,
    pub own_turn_on_send: Option<OwnTurn>,
    pub flood: Option<u64>,
    pub late_id_ms: Option<u64>,
    pub late_init_ms: Option<u64>,
    pub late_id: Option<String>,
    pub say: Option<String>,
}

impl Script {
    /// Takes every directive out of `text`; later ones win. Returns the words that are left, trimmed.
    pub fn take_from(&mut self, text: &str) -> String {
        let mut words = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(start) = rest.find("{{") {
            words.push_str(&rest[..start]);
            let inside = &rest[start + 2..];
            let mut tried = self.clone();
            match tried.group(inside) {
                Some(used) => {
                    *self = tried;
                    rest = &inside[used..];
                }
                None => {
                    words.push_str("{{");
                    rest = inside;
                }
            }
        }
        words.push_str(rest);
        words.trim().to_owned()
    }

    /// Applies one group that starts after its `{{`; returns how many bytes it took with its `}}`.
    fn group(&mut self, inside: &str) -> Option<usize> {
        let mut at = 0;
        let mut any = false;
        loop {
            at += inside[at..].len() - inside[at..].trim_start().len();
            let rest = &inside[at..];
            if rest.starts_with("}}") {
                return any.then_some(at + 2);
            }
            let key_len = rest.find(|c: char| !(c.is_ascii_lowercase() || c == '_')).filter(|len| *len > 0)?;
            let (key, rest) = rest.split_at(key_len);
            at += key_len;
            let mut value = String::new();
            if let Some(rest) = rest.strip_prefix('=') {
                let (read, used) = value_of(rest)?;
                value = read;
                at += 1 + used;
            }
            self.set(key, value)?;
            any = true;
        }
    }

    /// One key; `None` for a key or a value that is none of ours.
    fn set(&mut self, key: &str, value: String) -> Option<()> {
        let bare_or_on = matches!(value.as_str(), "" | "1" | "on" | "true");
        match key {
            "delay_ms" => self.delay_ms = value.parse().ok()?,
            "init_ms" => self.init_ms = value.parse().ok()?,
            "deltas" => self.deltas = Some(value.parse().ok().filter(|n| *n > 0)?),
            "delta_ms" => self.delta_ms = value.parse().ok()?,
            "size" => self.size = Some(value.parse().ok().filter(|n| *n <= ANSWER_BYTES_MAX)?),
            "think" => self.think = Some(value),
            "tool" => self.tool = Some(value),
            "tool_ms" => self.tool_ms = value.parse().ok()?,
            "ask" if bare_or_on => self.ask = true,
            "error" => self.error = Some(value),
            "hang" if bare_or_on => self.hang = true,
            "torn" if bare_or_on => self.torn = true,
            "die" => {
                self.die = Some(match value.as_str() {
                    "before" => Die::Before,
                    "mid" => Die::Mid,
                    "after" => Die::After,
                    _ => return None,
                });
            }
            "ignore" => match value.as_str() {
                "interrupt" => self.interrupts = Some(Interrupts::Ignored),
                "answered" => self.interrupts = Some(Interrupts::OnlyAnswered),
                "sigterm" => self.ignore_sigterm = true,
                "both" => {
                    self.interrupts = Some(Interrupts::Ignored);
                    self.ignore_sigterm = true;
                }
                _ => return None,
            },
            "bg_ms" => self.bg_ms = Some(value.parse().ok()?),
            "flush_ms" => self.flush_ms = Some(value.parse().ok()?),
            "user_flush_ms" => self.user_flush_ms = Some(value.parse().ok()?),
            "dedup" => {
                self.dedup = Some(match value.as_str() {
                    "on" => Dedup::Told,
                    "silent" => Dedup::Silent,
                    "off" => Dedup::Off,
                    _ => return None,
                });
            }
            "keep_uuid" => {
                self.keep_uuid = Some(match value.as_str() {
                    "on" => true,
                    "off" => false,
                    _ => return None,
                });
            }
            "own_turn_on_send" => {
                self.own_turn_on_send = Some(match value.as_str() {
                    "fold" => OwnTurn::Fold,
                    _ if bare_or_on => OwnTurn::Queue,
                    _ => return None,
                });
            }
            "flood" => self.flood = Some(value.parse().ok().filter(|n| *n <= ANSWER_BYTES_MAX as u64 / 16)?),
            "late_id_ms" => self.late_id_ms = Some(value.parse().ok()?),
            "late_init_ms" => self.late_init_ms = Some(value.parse().ok()?),
            "late_id" => {
                self.late_id = Some(crate::ids::SessionId::parse(&value).ok()?.as_str().to_owned());
                self.late_id_ms.get_or_insert_default();
            }
            "say" => self.say = Some(value),
            _ => return None,
        }
        Some(())
    }
}

/// The value after `=`: quoted with `\"`, `\\` and `\n`, or up to a blank or `}}`. And the bytes it took.
fn value_of(rest: &str) -> Option<(String, usize)> {
    let Some(quoted) = rest.strip_prefix('"') else {
        let end = rest.find(char::is_whitespace).unwrap_or(rest.len()).min(rest.find("}}")?);
        return Some((rest[..end].to_owned(), end));
    };
    let mut value = String::new();
    let mut letters = quoted.char_indices();
    while let Some((at, letter)) = letters.next() {
        match letter {
            '"' => return Some((value, at + 2)),
            '\\' => match letters.next()?.1 {
                'n' => value.push('\n'),
                other => value.push(other),
            },
            other => value.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> (String, Script) {
        let mut script = Script::default();
        let words = script.take_from(text);
        (words, script)
    }

    #[test]
    fn directives_leave_the_words_and_stand_anywhere() {
        let (words, script) = read("hello {{delta_ms=20 deltas=5}} there {{tool hang ignore=both}}");
        assert_eq!(words, "hello  there");
        assert_eq!((script.delta_ms, script.deltas, script.hang), (20, Some(5), true));
        assert_eq!((script.tool.as_deref(), script.interrupts), (Some(""), Some(Interrupts::Ignored)));
        assert!(script.ignore_sigterm);
        let (words, script) = read(r#"{{say="two }} words \"quoted\"\nline" die=mid flush_ms=-30 size=9}}"#);
        assert_eq!(words, "");
        assert_eq!(script.say.as_deref(), Some("two }} words \"quoted\"\nline"));
        assert_eq!((script.die, script.flush_ms, script.size), (Some(Die::Mid), Some(-30), Some(9)));
        assert_eq!(read("{{delay_ms=5}}{{delay_ms=7}}").1.delay_ms, 7);
    }

    #[test]
    fn braces_of_a_person_stay_as_they_are() {
        for text in [
            "{{name}}",
            "{{}}",
            "{{ delay_ms=abc }}",
            "{{delay_ms=5",
            "{{say=\"open}}",
            "{{die=never}}",
            "a {{ b",
            "{{delay_ms=5 unknown=1}}",
            "{{deltas=0}}",
            "{{size=999999999999}}",
            "{{ключ=1}}",
        ] {
            assert_eq!(read(text), (text.to_owned(), Script::default()), "{text}");
        }
        assert_eq!(read("{{x}} {{delay_ms=5}} y").0, "{{x}}  y");
    }
}
