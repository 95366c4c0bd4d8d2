//! PURE. Who may talk: the Host allow-list, the Origin rule, the bearer token or its cookie, the one-time login codes.
//!
//! Leaves reading the token file to `gate::token` and the fields of a head to `gate::head`. Rule a change could break:
//! a page of another origin, or one that reached us under another name (DNS rebinding), never gets past here, and no
//! secret can be printed from here.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use crate::error::{Code, Error, Result};

/// Shortest token that we take, in bytes: below this it can be guessed.
pub const TOKEN_BYTES_MIN: usize = 16;
/// Longest token that we take, in bytes: it must fit a header field beside a cookie.
pub const TOKEN_BYTES_MAX: usize = 512;
/// How long a login code is good, in milliseconds: time to copy a link, no longer.
pub const CODE_LIFE_MS: u64 = 10 * 60 * 1000;
/// Login codes that wait at once; the oldest goes first.
const CODES_MAX: usize = 16;

/// A bearer token; never printed.
#[derive(Clone)]
pub struct Token(Box<[u8]>);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

impl Token {
    /// Takes [`TOKEN_BYTES_MIN`] to [`TOKEN_BYTES_MAX`] of `A-Z a-z 0-9 - . _ ~ + / =`, what a header and a cookie carry
    /// without quoting.
    ///
    /// # Errors
    /// [`Code::BadField`] for anything else; the text does not hold it.
    pub fn parse(text: &str) -> Result<Self> {
        let fits = (TOKEN_BYTES_MIN..=TOKEN_BYTES_MAX).contains(&text.len());
        let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_' | b'~' | b'+' | b'/' | b'=');
        if fits && text.bytes().all(plain) {
            return Ok(Self(text.as_bytes().into()));
        }
        let range = format!("a token is {TOKEN_BYTES_MIN} to {TOKEN_BYTES_MAX} of A-Z a-z 0-9 - . _ ~ + / =");
        Err(Error::new(Code::BadField, range))
    }

    /// Compares in a time that depends on the length of `given` alone.
    #[must_use]
    pub fn matches(&self, given: &[u8]) -> bool {
        same(&self.0, given)
    }

    /// The value of its cookie.
    fn cookie_value(&self) -> &str {
        std::str::from_utf8(&self.0).unwrap_or_default()
    }
}

/// Equality without an early exit.
fn same(ours: &[u8], given: &[u8]) -> bool {
    let mut differ = u8::from(ours.len() != given.len());
    for (at, byte) in given.iter().enumerate() {
        differ |= byte ^ ours[at % ours.len().max(1)];
    }
    std::hint::black_box(differ) == 0
}

/// Over which door a request came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Door {
    /// The port; `local` is our end of the connection, known only when we listen on every address.
    Port {
        /// Our end.
        local: Option<SocketAddr>,
    },
    /// `chat.sock`, where the kernel vouched for the peer's uid.
    ChatSocket,
}

/// What decides who may talk.
#[derive(Debug)]
pub struct Guard {
    hosts: Vec<String>,
    origins: Vec<String>,
    any_address: bool,
    port: u16,
    token: Option<Token>,
    secure_cookie: bool,
    cookie_name: String,
}

impl Guard {
    /// A guard of a server that listens on `listen` (its real port) and is called `public_url` by a proxy in front.
    ///
    /// # Errors
    /// [`Code::BadField`] when `public_url` is not `http(s)://host[:port]`, or when another machine could reach us
    /// without a token.
    pub fn new(listen: SocketAddr, public_url: Option<&str>, token: Option<Token>) -> Result<Self> {
        if !listen.ip().is_loopback() && token.is_none() {
            let text = format!("listening on {listen} needs --token-file: other machines could reach it");
            return Err(Error::new(Code::BadField, text));
        }
        let port = listen.port();
        let mut hosts = vec![format!("127.0.0.1:{port}"), format!("localhost:{port}"), format!("[::1]:{port}")];
        if !listen.ip().is_unspecified() {
            hosts.push(listen.to_string());
        }
        if port == 80 {
            // A client leaves out the port that the scheme implies.
            let bare: Vec<String> = hosts.iter().map(|h| h.trim_end_matches(":80").to_owned()).collect();
            hosts.extend(bare);
        }
        let mut origins: Vec<String> = hosts.iter().map(|h| format!("http://{h}")).collect();
        let mut secure_cookie = false;
        if let Some(url) = public_url {
            let (scheme, authority) = public_authority(url)?;
            secure_cookie = scheme == "https";
            origins.push(format!("{scheme}://{authority}"));
            let implied = if secure_cookie { ":443" } else { ":80" };
            match authority.strip_suffix(implied) {
                // Browsers leave the implied port out of Origin and Host, other clients may write it.
                Some(bare) => {
                    origins.push(format!("{scheme}://{bare}"));
                    hosts.push(bare.to_owned());
                }
                None if !has_port(&authority) => hosts.push(format!("{authority}{implied}")),
                None => {}
            }
            hosts.push(authority);
        }
        let any_address = listen.ip().is_unspecified();
        // Cookies are shared by all ports of a host: two servers on one machine must not overwrite each other's.
        let cookie_name = format!("beebox-{port}");
        Ok(Self { hosts, origins, any_address, port, token, secure_cookie, cookie_name })
    }

    /// Checks the authority that the client called us by.
    ///
    /// # Errors
    /// [`Code::ForbiddenHost`].
    pub fn vet_host(&self, host: &str, door: Door) -> Result<()> {
        let ours = self.hosts.iter().any(|h| h.eq_ignore_ascii_case(host))
            || match door {
                Door::ChatSocket => ["localhost", "127.0.0.1", "[::1]"].iter().any(|h| h.eq_ignore_ascii_case(host)),
                Door::Port { local } => self.any_address && local.is_some_and(|l| self.is_address(host, l)),
            };
        if ours { Ok(()) } else { Err(Error::new(Code::ForbiddenHost, "the Host header names none of our addresses")) }
    }

    /// A literal address cannot be rebound, so the address that the client really reached is one of ours.
    fn is_address(&self, host: &str, local: SocketAddr) -> bool {
        let plain = |ip: IpAddr| ip.to_canonical();
        match host.parse::<SocketAddr>() {
            Ok(named) => named.port() == self.port && plain(named.ip()) == plain(local.ip()),
            Err(_) => self.port == 80 && host.parse::<IpAddr>().is_ok_and(|ip| plain(ip) == plain(local.ip())),
        }
    }

    /// Checks the page that asks, if a page asks.
    ///
    /// # Errors
    /// [`Code::ForbiddenOrigin`] for `null` and for every origin but ours.
    pub fn vet_origin(&self, origin: Option<&str>, door: Door) -> Result<()> {
        let Some(origin) = origin else { return Ok(()) };
        let ours = self.origins.iter().any(|o| o.eq_ignore_ascii_case(origin))
            || match door {
                Door::ChatSocket => false,
                Door::Port { local } => {
                    self.any_address
                        && origin
                            .strip_prefix("http://")
                            .is_some_and(|host| local.is_some_and(|l| self.is_address(host, l)))
                }
            };
        if ours { Ok(()) } else { Err(Error::new(Code::ForbiddenOrigin, "a page of another origin asks")) }
    }

    /// Checks the bearer token or its cookie. The kernel's word about the peer of `chat.sock` stands for a token.
    ///
    /// # Errors
    /// [`Code::Unauthorized`].
    pub fn vet_token(&self, authorization: Option<&str>, cookie: Option<&str>, door: Door) -> Result<()> {
        let Some(token) = &self.token else {
            return Ok(());
        };
        if door == Door::ChatSocket {
            return Ok(());
        }
        let given = match authorization {
            Some(value) => match value.split_once(' ') {
                Some((scheme, rest)) if scheme.eq_ignore_ascii_case("bearer") => Some(rest.trim_start()),
                Some(_) | None => None,
            },
            None => cookie.and_then(|all| find_cookie(all, &self.cookie_name)),
        };
        match given {
            Some(given) if token.matches(given.as_bytes()) => Ok(()),
            Some(_) => Err(Error::new(Code::Unauthorized, "the token is not ours")),
            None => Err(Error::new(Code::Unauthorized, "a bearer token is needed")),
        }
    }

    /// Changes the token.
    pub fn set_token(&mut self, token: Token) {
        self.token = Some(token);
    }

    /// True when a token is needed.
    #[must_use]
    pub fn needs_token(&self) -> bool {
        self.token.is_some()
    }

    /// True when `given` is the token itself (pasted into the login page).
    #[must_use]
    pub fn is_token(&self, given: &str) -> bool {
        self.token.as_ref().is_some_and(|t| t.matches(given.as_bytes()))
    }

    /// The Set-Cookie value that logs a browser in: out of reach of scripts, never sent along from another site.
    #[must_use]
    pub fn set_cookie(&self) -> Option<String> {
        let value = self.token.as_ref()?.cookie_value();
        let secure = if self.secure_cookie { "; Secure" } else { "" };
        Some(format!("{}={value}; Path=/; HttpOnly; SameSite=Strict; Max-Age=31536000{secure}", self.cookie_name))
    }
}

fn has_port(authority: &str) -> bool {
    let after = authority.rfind(']').map_or(authority, |at| &authority[at..]);
    after.contains(':')
}

/// Scheme and authority of `http(s)://host[:port][/]`, in lower case.
fn public_authority(url: &str) -> Result<(&'static str, String)> {
    let wrong = || Error::new(Code::BadField, format!("--public-url {url}: must be http(s)://host[:port]"));
    let (scheme, rest) = url.split_once("://").ok_or_else(wrong)?;
    let scheme = match scheme {
        "http" => "http",
        "https" => "https",
        _ => return Err(wrong()),
    };
    let authority = rest.strip_suffix('/').unwrap_or(rest).to_ascii_lowercase();
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_' | b':' | b'[' | b']');
    if authority.is_empty() || !authority.bytes().all(plain) {
        return Err(wrong());
    }
    Ok((scheme, authority))
}

fn find_cookie<'a>(all: &'a str, name: &str) -> Option<&'a str> {
    all.split(';').find_map(|pair| {
        let (key, value) = pair.trim().split_once('=')?;
        (key == name).then_some(value)
    })
}

/// The one-time codes of login links.
#[derive(Default)]
pub struct Logins(Vec<(String, u64)>);

impl fmt::Debug for Logins {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Logins({})", self.0.len())
    }
}

impl Logins {
    /// Remembers `code`, made from fresh randomness, until it is used or [`CODE_LIFE_MS`] went by.
    pub fn add(&mut self, code: String, now_ms: u64) {
        self.0.retain(|(_, until)| *until > now_ms);
        if self.0.len() == CODES_MAX {
            self.0.remove(0);
        }
        self.0.push((code, now_ms + CODE_LIFE_MS));
    }

    /// True once for a code that is good; it is used up.
    pub fn redeem(&mut self, given: &str, now_ms: u64) -> bool {
        self.0.retain(|(_, until)| *until > now_ms);
        // Every code is compared to its end, so that time tells nothing about any of them.
        let hit = self
            .0
            .iter()
            .enumerate()
            .fold(None, |hit, (at, (code, _))| if same(code.as_bytes(), given.as_bytes()) { Some(at) } else { hit });
        hit.map(|at| self.0.remove(at)).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PORT: Door = Door::Port { local: None };

    fn guard(listen: &str, url: Option<&str>, token: Option<&str>) -> Guard {
        Guard::new(listen.parse().unwrap(), url, token.map(|t| Token::parse(t).unwrap())).unwrap()
    }

    #[test]
    fn only_our_own_names_pass_as_host() {
        let g = guard("127.0.0.1:7717", Some("https://box.example/"), None);
        for good in
            ["127.0.0.1:7717", "localhost:7717", "LOCALHOST:7717", "[::1]:7717", "box.example", "box.example:443"]
        {
            assert!(g.vet_host(good, PORT).is_ok(), "{good}");
        }
        for bad in [
            "",
            "localhost",
            "127.0.0.1",
            "localhost:7718",
            "localhost.:7717",
            "localhost.evil.example:7717",
            "127.0.0.1.nip.io:7717",
            "evil.example",
            "box.example:80",
            "box.example.evil.example",
            "0.0.0.0:7717",
            "127.0.0.1:07717",
            "user@localhost:7717",
        ] {
            assert_eq!(g.vet_host(bad, PORT).unwrap_err().code(), Code::ForbiddenHost, "{bad}");
        }
        assert!(g.vet_host("localhost", Door::ChatSocket).is_ok());
        assert!(g.vet_host("evil.example", Door::ChatSocket).is_err());
    }

    #[test]
    fn listening_everywhere_takes_the_address_that_was_reached_and_no_name() {
        let g = guard("0.0.0.0:80", None, Some("0123456789abcdef"));
        let door = Door::Port { local: Some("192.168.1.5:80".parse().unwrap()) };
        assert!(g.vet_host("192.168.1.5", door).is_ok());
        assert!(g.vet_host("192.168.1.5:80", door).is_ok());
        assert!(g.vet_host("localhost", door).is_ok());
        assert!(g.vet_host("192.168.1.6", door).is_err());
        assert!(g.vet_host("evil.example", door).is_err());
        assert!(g.vet_origin(Some("http://192.168.1.5"), door).is_ok());
        assert!(g.vet_origin(Some("http://192.168.1.6"), door).is_err());
    }

    #[test]
    fn foreign_and_null_origins_are_refused() {
        let g = guard("127.0.0.1:7717", Some("https://box.example"), None);
        for good in [None, Some("http://127.0.0.1:7717"), Some("http://localhost:7717"), Some("https://box.example")] {
            assert!(g.vet_origin(good, PORT).is_ok(), "{good:?}");
        }
        for bad in [
            "null",
            "",
            "http://evil.example",
            "https://localhost:7717",
            "http://localhost",
            "http://localhost:7717.evil.example",
            "http://box.example",
            "http://localhost:7717/",
        ] {
            assert_eq!(g.vet_origin(Some(bad), PORT).unwrap_err().code(), Code::ForbiddenOrigin, "{bad}");
        }
    }

    #[test]
    fn the_token_comes_as_bearer_or_as_our_cookie_and_chat_sock_needs_none() {
        let g = guard("127.0.0.1:7717", None, Some("0123456789abcdef"));
        let ok = |auth, cookie| g.vet_token(auth, cookie, PORT).is_ok();
        assert!(ok(Some("Bearer 0123456789abcdef"), None));
        assert!(ok(Some("bearer  0123456789abcdef"), None));
        assert!(ok(None, Some("a=b; beebox-7717=0123456789abcdef")));
        assert!(!ok(None, None));
        assert!(!ok(Some("Bearer 0123456789abcdeg"), None));
        assert!(!ok(Some("Bearer 0123456789abcde"), None));
        assert!(!ok(Some("Bearer 0123456789abcdef0123456789abcdef"), None));
        assert!(!ok(Some("Basic 0123456789abcdef"), None));
        assert!(!ok(Some("Basic x"), Some("beebox-7717=0123456789abcdef")));
        assert!(!ok(None, Some("beebox-7718=0123456789abcdef")));
        assert!(g.vet_token(None, None, Door::ChatSocket).is_ok());
        assert!(guard("127.0.0.1:7717", None, None).vet_token(None, None, PORT).is_ok());
        assert_eq!(format!("{:?}", g.token), "Some(Token(…))");
    }

    #[test]
    fn an_open_address_without_a_token_and_a_strange_public_url_are_refused() {
        let new = |listen: &str, url| Guard::new(listen.parse().unwrap(), url, None).map(|_| ());
        for listen in ["0.0.0.0:1", "[::]:1", "10.0.0.1:1"] {
            assert!(new(listen, None).unwrap_err().text().contains("--token-file"), "{listen}");
        }
        for url in ["box.example", "ftp://box", "https://", "https://a/b", "https://a b", "https://user@box"] {
            assert!(new("127.0.0.1:1", Some(url)).is_err(), "{url}");
        }
        for short in ["", "short", "with space in the middle", "quo\"te-0123456789"] {
            assert!(Token::parse(short).is_err(), "{short}");
        }
    }

    #[test]
    fn a_login_code_is_good_once_and_for_ten_minutes() {
        let mut codes = Logins::default();
        codes.add("one".to_owned(), 0);
        codes.add("two".to_owned(), 5);
        assert!(!codes.redeem("three", 6));
        assert!(codes.redeem("one", 6));
        assert!(!codes.redeem("one", 6));
        assert!(!codes.redeem("two", 5 + CODE_LIFE_MS));
    }
}
