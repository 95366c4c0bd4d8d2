//! What the harness promises to the other tests.

use beebox_chatd::load::client::Photo;

use crate::support::{Options, Server, texts};

#[test]
fn a_server_that_refuses_its_settings_is_reported_with_its_own_words() {
    let refused = Options::default().args(["--no-such-flag"]).try_start();
    let words = refused.err().expect("the flag does not exist").to_string();
    assert!(words.contains("ended before it listened"), "{words}");
}

#[test]
fn a_killed_server_comes_back_on_its_box_and_port_and_ends_with_0_when_asked() {
    let mut server = Server::new();
    let (addr, pid) = (server.addr(), server.pid());
    let (accepted, end) = server.converse("new", "first words");
    assert_eq!(end.event, "chat-complete");
    assert!(server.thread_names().iter().any(|n| n == "journal"), "{:?}", server.thread_names());
    assert!(server.rss_kib() > 0 && server.fds() > 0);
    assert_eq!(server.agents().len(), 1);
    let cursor = server.follow().cursor();

    server.kill9();
    assert!(!server.is_running());
    server.restart();
    assert_eq!(server.addr(), addr);
    assert_ne!(server.pid(), pid);
    server.wait_until("the old agent to be gone", |s| s.agents().is_empty().then_some(()));
    assert_eq!(texts(&server.history(&accepted.session_id), "user"), ["first words"]);

    let mut sse = server.follow_sse(Some(&cursor), true);
    let photo = Photo::png(1, 2000, 1);
    let second =
        server.send_as(&accepted.session_id, "see [image#1]", Some("the-second"), std::slice::from_ref(&photo));
    let again = server.send_as(&accepted.session_id, "see [image#1]", Some("the-second"), &[photo]);
    assert!(again.deduplicated && again.message_uuid == second.message_uuid, "{again:?}");
    sse.end_of_message(&second.message_uuid);
    assert!(server.terminate().success());
}
