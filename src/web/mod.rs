//! The web page, embedded in the binary: plain HTML, CSS and modules, served as they lie in this folder. Leaves joining the
//! two records to `reconcile.js` and every answer's head to the handlers. Rule a change could break: a first load stays
//! under 60 KiB, and nothing in it needs more than [`CSP`] allows: no inline script or style, no other origin.

use std::sync::LazyLock;

/// The `Content-Security-Policy` of every page answer. `blob:` is for photos shown before they are sent; with trusted types
/// required and none allowed, markup that reaches a sink like `innerHTML` throws instead of being parsed.
pub const CSP: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; \
    base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

/// What a browser may keep without asking, as `Cache-Control`: nothing, but an unchanged asset costs one 304 by its `etag`.
pub const CACHE_CONTROL: &str = "no-cache";

/// One file of the page, as it is and compressed. Two representations, so two strong etags.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asset {
    /// The `Content-Type`.
    pub mime: &'static str,
    /// The whole file.
    pub bytes: &'static [u8],
    /// The strong `ETag` of `bytes`, in its quotes.
    pub etag: &'static str,
    /// The file as `Content-Encoding: gzip`, for who accepts it (send `Vary: Accept-Encoding` with both).
    pub gz: &'static [u8],
    /// The strong `ETag` of `gz`, in its quotes.
    pub gz_etag: &'static str,
}

macro_rules! files {
    ($($name:literal => $mime:expr),* $(,)?) => {
        const FILES: &[(&str, &str, &[u8])] = &[$(($name, $mime, include_bytes!($name))),*];
    };
}

const JS: &str = "text/javascript; charset=utf-8";
files! {
    "index.html" => "text/html; charset=utf-8",
    "style.css" => "text/css; charset=utf-8",
    "icon.svg" => "image/svg+xml",
    "app.js" => JS,
    "conversation.js" => JS,
    "live.js" => JS,
    "markdown.js" => JS,
    "net.js" => JS,
    "outbox.js" => JS,
    "photos.js" => JS,
    "reconcile.js" => JS,
    "view.js" => JS,
}

/// What is made of a file once, at the first request: etags and the compressed form.
struct Made {
    etag: String,
    gz: Vec<u8>,
    gz_etag: String,
}

/// In the order of `FILES`. All of it takes some 10 ms of one worker, once, and not at the start.
static MADE: LazyLock<Vec<Made>> = LazyLock::new(|| {
    FILES
        .iter()
        .map(|(_, _, bytes)| {
            let tag = fnv(bytes);
            Made { etag: format!("\"{tag:016x}\""), gz: gzip(bytes), gz_etag: format!("\"{tag:016x}-gz\"") }
        })
        .collect()
});

/// The file behind a path, `None` if the page has no such file. `/` is the page itself.
pub fn asset(path: &str) -> Option<Asset> {
    let name = match path.strip_prefix('/').unwrap_or(path) {
        "" => "index.html",
        name => name,
    };
    let at = FILES.iter().position(|(file, _, _)| *file == name)?;
    let (_, mime, bytes) = FILES[at];
    let made = &MADE[at];
    Some(Asset { mime, bytes, etag: &made.etag, gz: &made.gz, gz_etag: &made.gz_etag })
}

/// FNV-1a, 64 bits: it only has to differ between two builds.
fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The gzip form of `bytes`: head, deflated data, CRC-32 and length (RFC 1952).
fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut out = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 2, 255];
    out.extend(miniz_oxide::deflate::compress_to_vec(bytes, 9));
    out.extend(crc32(bytes).to_le_bytes());
    out.extend((bytes.len() as u32).to_le_bytes());
    out
}

/// CRC-32 bit by bit: 0.1 MB, once.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0_u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |c, _| if c & 1 == 1 { (c >> 1) ^ 0xedb8_8320 } else { c >> 1 })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_is_the_page_and_unknown_paths_are_nothing() {
        assert_eq!(asset("/"), asset("/index.html"));
        assert_eq!(asset("/").unwrap().mime, "text/html; charset=utf-8");
        assert_eq!(asset("/mod.rs"), None);
        assert_eq!(asset("/../web/app.js"), None);
    }

    #[test]
    fn a_first_load_stays_under_60_kib() {
        let bytes: usize = FILES.iter().map(|(name, _, _)| asset(name).unwrap().gz.len()).sum();
        assert!(bytes < 56 * 1024, "{bytes} bytes leave no room for the heads and the first answers");
    }

    #[test]
    fn gzip_comes_back_as_it_was() {
        for (name, _, bytes) in FILES {
            let gz = asset(name).unwrap().gz;
            let data = &gz[10..gz.len() - 8];
            assert_eq!(miniz_oxide::inflate::decompress_to_vec(data).unwrap(), *bytes, "{name}");
        }
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
    }

    #[test]
    fn nothing_in_the_page_needs_an_inline_script_or_style_or_another_origin() {
        let html = std::str::from_utf8(asset("/").unwrap().bytes).unwrap();
        for never in ["<style", " style=", " onclick", "javascript:", "http://", "https://", "<script>"] {
            assert!(!html.contains(never), "{never}");
        }
        for (name, _, bytes) in FILES.iter().filter(|(name, _, _)| name.ends_with(".js")) {
            let js = std::str::from_utf8(bytes).unwrap();
            for never in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"] {
                assert!(!js.contains(never), "{name}: {never}");
            }
        }
    }

    #[test]
    fn every_file_the_page_names_is_there() {
        let all: String = FILES.iter().map(|(_, _, bytes)| String::from_utf8_lossy(bytes)).collect();
        for part in all
            .split(['"', '('])
            .filter(|p| p.starts_with("./") || (p.starts_with('/') && p.contains('.') && !p.contains(' ')))
        {
            if part.ends_with(".js") || part.ends_with(".css") || part.ends_with(".svg") {
                assert!(asset(part.trim_start_matches('.')).is_some(), "{part}");
            }
        }
    }

    #[test]
    fn etags_are_strong_and_differ() {
        let (page, app) = (asset("/").unwrap(), asset("/app.js").unwrap());
        assert!(page.etag.starts_with('"') && page.etag.len() == 18);
        assert_ne!(page.etag, app.etag);
    }
}
