//! The small commands beside the server: `token`, `login`, `tail`, `send`. They speak to a running
//! server over `chat.sock`, like any other client. Rule a change could break: no token is ever printed.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;

use serde_json::json;

use crate::error::{Code, Error, Result};
use crate::http::gate::token;

/// Creates a token file.
///
/// # Errors
/// `bad_field` when it exists and `replace` is not said, or cannot be written.
pub fn token(file: &Path, replace: bool) -> Result<()> {
    if replace
        && let Err(e) = std::fs::remove_file(file)
        && e.kind() != std::io::ErrorKind::NotFound
    {
        return Err(Error::new(Code::BadField, format!("token file {}: {e}", file.display())));
    }
    token::create(file)?;
    let mut out = std::io::stdout();
    writeln!(out, "wrote a fresh token to {} (mode 600)", file.display())?;
    writeln!(out, "serve with it:  beebox-chatd --token-file {}", file.display())?;
    writeln!(out, "clients send:   Authorization: Bearer $(cat {})", file.display())?;
    Ok(())
}

/// A request over the local socket of a running box; returns status and the reader of the body.
fn ask(box_dir: &Path, head: &str, body: &[u8]) -> Result<(u16, BufReader<UnixStream>)> {
    let path = box_dir.join(".beebox").join("chat.sock");
    // A path that is too long for a socket address is reached through its folder's descriptor.
    let dir = std::fs::File::open(box_dir.join(".beebox"));
    let mut stream = UnixStream::connect(&path)
        .or_else(|e| match &dir {
            Ok(dir) => {
                use std::os::fd::AsRawFd as _;
                UnixStream::connect(format!("/proc/self/fd/{}/chat.sock", dir.as_raw_fd()))
            }
            Err(_) => Err(e),
        })
        .map_err(|e| Error::new(Code::BadField, format!("no server answers for box {}: {e}", box_dir.display())))?;
    write!(stream, "{head}Host: localhost\r\nConnection: close\r\n")?;
    if !body.is_empty() {
        write!(stream, "Content-Type: application/json\r\nContent-Length: {}\r\n", body.len())?;
    }
    stream.write_all(b"\r\n")?;
    stream.write_all(body)?;
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let status = line.split(' ').nth(1).and_then(|s| s.parse().ok()).unwrap_or(0);
    while line != "\r\n" {
        line.clear();
        if reader.read_line(&mut line)? == 0 {
            return Err(Error::internal("the server closed the connection"));
        }
    }
    Ok((status, reader))
}

/// Sends a message to a running box and prints the server's answer.
///
/// # Errors
/// No server, or what it refused.
pub fn send(box_dir: &Path, session: &str, message: &str) -> Result<()> {
    let mut text = message.to_owned();
    if message == "-" {
        text.clear();
        std::io::stdin().read_to_string(&mut text)?;
    }
    let body = json!({"session": session, "message": text}).to_string();
    let (status, mut reader) = ask(box_dir, "POST /api/chat/send HTTP/1.1\r\n", body.as_bytes())?;
    let mut answer = String::new();
    reader.read_to_string(&mut answer)?;
    if status != 200 {
        return Err(Error::internal(format!("the server answered {status}: {}", answer.trim())));
    }
    writeln!(std::io::stdout(), "{}", answer.trim())?;
    Ok(())
}

/// Prints a link that logs a browser in, good once and for a short time.
///
/// # Errors
/// No server, or one without a token.
pub fn login(box_dir: &Path) -> Result<()> {
    #[derive(serde::Deserialize)]
    struct Link {
        url: String,
    }
    let (status, mut reader) = ask(box_dir, "POST /login HTTP/1.1\r\n", b"{}")?;
    let mut answer = String::new();
    reader.read_to_string(&mut answer)?;
    let link: Link = serde_json::from_str(&answer)
        .map_err(|_| Error::internal(format!("the server answered {status}: {}", answer.trim())))?;
    writeln!(std::io::stdout(), "{}", link.url)?;
    Ok(())
}

/// Follows the events of a running box, one JSON object a line, until it goes down.
///
/// # Errors
/// No server, or a cursor it refuses.
pub fn tail(box_dir: &Path, after: Option<&str>) -> Result<()> {
    let query = after.map(|a| format!("?after={a}")).unwrap_or_default();
    let head = format!("GET /api/events{query} HTTP/1.1\r\nAccept: text/event-stream\r\n");
    let (status, reader) = ask(box_dir, &head, b"")?;
    if status != 200 {
        return Err(Error::new(Code::BadField, format!("the server answered {status}")));
    }
    let mut out = std::io::stdout();
    for line in reader.lines() {
        if let Some(data) = line?.strip_prefix("data:") {
            writeln!(out, "{}", data.trim_start())?;
            out.flush()?;
        }
    }
    Ok(())
}
