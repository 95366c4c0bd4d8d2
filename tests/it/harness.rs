//! What the harness promises to the other tests.

use crate::support::Options;

#[test]
fn a_server_that_refuses_its_settings_is_reported_with_its_own_words() {
    let refused = Options::default().args(["--no-such-flag"]).try_start();
    let words = refused.err().expect("the flag does not exist").to_string();
    assert!(words.contains("ended before it listened"), "{words}");
}
