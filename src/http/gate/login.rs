//! The login page: turns the one-time code behind `#` (which no browser sends to a server) into a cookie.
//! Rule a change could break: neither code nor token is ever in a URL that is requested, or in a page.

use serde::{Deserialize, Serialize};

use crate::http::reply::{Body, Reply};

/// Answer on `chat.sock`.
#[derive(Serialize)]
pub struct Link {
    /// The link for a browser, good once.
    pub url: String,
}

/// Answer to a good code.
#[derive(Serialize)]
pub struct Done {
    /// Always true.
    pub ok: bool,
}

/// The code of a login's body.
#[must_use]
pub fn code(body: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Shape {
        code: String,
    }
    serde_json::from_slice::<Shape>(body).ok().map(|s| s.code)
}

const PAGE: &str = r#"<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Log in</title><form id="f"><label>Login code <input id="c" type="password" autocomplete="off"></label> <button>Log in</button></form><p id="p"></p>
<script>
const say = text => { document.getElementById('p').textContent = text; };
const enter = code => fetch('/login', { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify({ code }) })
  .then(r => { if (r.ok) location.replace('/'); else say('This code is used up, too old, or not ours.'); }, () => say('The server cannot be reached.'));
document.getElementById('f').addEventListener('submit', e => { e.preventDefault(); enter(document.getElementById('c').value.trim()); });
const code = location.hash.slice(1);
if (code) { history.replaceState(null, '', '/login'); enter(code); }
</script></html>
"#;

/// What the page may do: run its own script, known by its hash, and talk to us.
const CSP: &str = "default-src 'none'; script-src 'sha256-7EcegEB6e58CxxnMuNj0h1o8PRiHGe9Taq3jWIbA/KI='; connect-src 'self'; base-uri 'none'; \
    form-action 'none'; frame-ancestors 'none'";

/// The page.
#[must_use]
pub fn page() -> Reply {
    let headers = [
        ("Content-Type", "text/html; charset=utf-8"),
        ("Cache-Control", "no-store"),
        ("X-Content-Type-Options", "nosniff"),
        ("Referrer-Policy", "no-referrer"),
        ("X-Frame-Options", "DENY"),
        ("Content-Security-Policy", CSP),
    ];
    let headers = headers.map(|(name, value)| (name, value.to_owned())).to_vec();
    Reply { status: 200, headers, body: Body::Bytes(PAGE.as_bytes().to_vec()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_login_body_is_an_object_with_a_code() {
        assert_eq!(code(br#"{"code":"abc","other":1}"#).as_deref(), Some("abc"));
        for bad in [&b""[..], b"{}", b"[]", b"{\"code\":1}", b"code"] {
            assert_eq!(code(bad), None);
        }
    }

    #[test]
    fn the_policy_of_the_login_page_names_its_own_script() {
        use sha2::{Digest as _, Sha256};
        let script = PAGE.split("<script>").nth(1).and_then(|rest| rest.split("</script>").next()).unwrap();
        let hash = crate::transcript::media::encode_base64(&Sha256::digest(script.as_bytes()));
        assert!(CSP.contains(&format!("'sha256-{hash}'")), "the script's hash is {hash}");
    }
}
