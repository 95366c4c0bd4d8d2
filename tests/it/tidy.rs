//! The house's own rules, read off its source: who may know whom, what is absent, which crate is named where.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
}

/// Every file of `src`, by its path from there, with its code (comments and tests cut off).
fn house() -> BTreeMap<String, String> {
    let mut files = Vec::new();
    sources(&root().join("src"), &mut files);
    files
        .into_iter()
        .filter(|f| !f.to_string_lossy().contains("tests"))
        .map(|f| {
            let text = std::fs::read_to_string(&f).unwrap();
            let code = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
            let code: Vec<&str> = code.lines().filter(|l| !l.trim_start().starts_with("//")).collect();
            (f.strip_prefix(root().join("src")).unwrap().to_string_lossy().into_owned(), code.join("\n"))
        })
        .collect()
}

/// The room of a file: the first part of its path without `.rs`.
fn room(file: &str) -> &str {
    file.split(['/', '.']).next().unwrap_or_default()
}

/// Rooms that a room may name, besides the words that everybody uses.
const ARROWS: &[(&str, &[&str])] = &[
    ("main", &["agent", "app", "config", "tools"]),
    ("app", &["archive", "bus", "config", "dump", "http", "journal", "mirror", "push", "session"]),
    ("agent", &["faults", "inbox", "transcript"]),
    ("archive", &["transcript"]),
    ("bus", &[]),
    ("config", &[]),
    ("faults", &[]),
    (
        "http",
        &[
            "agent",
            "archive",
            "bus",
            "config",
            "dump",
            "faults",
            "inbox",
            "journal",
            "lifecycle",
            "push",
            "session",
            "transcript",
            "web",
        ],
    ),
    ("inbox", &[]),
    ("journal", &["bus", "faults", "inbox"]),
    ("lifecycle", &["inbox"]),
    ("load", &[]),
    ("mirror", &["bus"]),
    ("push", &["bus"]),
    ("session", &["agent", "archive", "bus", "config", "faults", "inbox", "journal", "lifecycle", "transcript"]),
    ("tools", &["http"]),
    ("transcript", &[]),
    ("web", &[]),
    ("bin", &["load"]),
];
/// Words that every room uses; `model` is the model checker's world, compiled under its feature only.
const WORDS: &[&str] = &["clock", "dump", "error", "ids", "model", "supervisor", "sync", "threads"];

#[test]
fn rooms_know_only_whom_the_arrows_allow() {
    let arrows: BTreeMap<_, _> = ARROWS.iter().copied().collect();
    let mut wrong = Vec::new();
    for (file, code) in house() {
        let from = room(&file);
        if from == "lib" || WORDS.contains(&from) {
            continue;
        }
        let allowed = arrows.get(from).unwrap_or_else(|| panic!("{file}: a new room needs its row in ARROWS"));
        for part in code.split("crate::").skip(1).chain(code.split("beebox_chatd::").skip(1)) {
            let to: String = part.chars().take_while(|c| c.is_ascii_lowercase() || *c == '_').collect();
            if !to.is_empty() && to != from && !WORDS.contains(&to.as_str()) && !allowed.contains(&to.as_str()) {
                wrong.push(format!("{file} names {to}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn pure_rooms_touch_no_file_socket_process_thread_lock_or_clock() {
    const NEVER: &[&str] = &[
        "std::fs",
        "std::net::Tcp",
        "std::net::Udp",
        "os::unix::net",
        "std::process",
        "std::thread",
        "std::time::Instant",
        "SystemTime",
        "crate::sync",
        "crate::threads",
        "clock::now",
        "rustix::",
    ];
    let pure = |file: &str| {
        ["transcript/", "lifecycle/"].iter().any(|dir| file.starts_with(dir))
            || [
                "inbox.rs",
                "agent/wire.rs",
                "agent/adapt.rs",
                "agent/content.rs",
                "agent/turns.rs",
                "agent/scrub.rs",
                "http/route.rs",
                "http/guard.rs",
                "session/features.rs",
                "session/thread.rs",
            ]
            .contains(&file)
    };
    let mut seen = 0;
    for (file, code) in house().into_iter().filter(|(file, _)| pure(file)) {
        seen += 1;
        for word in NEVER {
            assert!(!code.contains(word), "{file} is pure and names {word}");
        }
    }
    assert!(seen >= 12, "the pure rooms were found");
}

#[test]
fn unsafe_is_in_one_file_at_most() {
    let with: Vec<_> =
        house().into_iter().filter(|(_, code)| code.contains("unsafe {")).map(|(file, _)| file).collect();
    assert!(with.len() <= 1, "{with:?}");
}

#[test]
fn files_begin_by_saying_what_they_are() {
    let mut files = Vec::new();
    sources(&root().join("src"), &mut files);
    sources(&root().join("tests/it"), &mut files);
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        assert!(text.starts_with("//! "), "{} begins without //!", file.display());
    }
}

#[test]
fn no_async_runtime_is_in_the_tree() {
    let lock = std::fs::read_to_string(root().join("Cargo.lock")).unwrap();
    let names: BTreeSet<&str> = lock.lines().filter_map(|l| l.strip_prefix("name = \"")?.strip_suffix('"')).collect();
    // The lock file has what every feature would bring in.
    assert!(names.contains("redis"), "the broker's client of feature `mirror` is looked at too");
    for runtime in ["tokio", "async-std", "smol", "async-executor", "futures-executor", "hyper", "actix-rt", "mio"] {
        assert!(!names.contains(runtime), "{runtime} is in Cargo.lock");
    }
    let tree = Command::new(env!("CARGO"))
        .args(["tree", "--offline", "--locked", "-e", "normal"])
        .current_dir(root())
        .output()
        .unwrap();
    let tree = String::from_utf8_lossy(&tree.stdout).into_owned();
    assert!(tree.contains("tiny_http"), "cargo tree lists our own: {tree}");
    assert!(!tree.contains("tokio") && !tree.contains("async-std"), "{tree}");
}

#[test]
fn only_the_worker_pool_names_tiny_http() {
    let with: Vec<_> =
        house().into_iter().filter(|(_, code)| code.contains("tiny_http::")).map(|(file, _)| file).collect();
    assert_eq!(with, ["http/server.rs"]);
}

#[test]
fn the_page_of_the_thread_table_names_every_fixed_thread() {
    let page = std::fs::read_to_string(root().join("src/lib.rs")).unwrap();
    for (file, code) in house() {
        for part in code.split("Name::fixed(\"").skip(1) {
            let name = part.split('"').next().unwrap_or_default();
            let load = file.starts_with("load/") || file.starts_with("bin/");
            assert!(load || page.contains(&format!("`{name}`")), "thread {name} of {file} is not in the table");
        }
    }
}

#[test]
fn the_top_level_holds_what_the_house_says() {
    let listed = Command::new("git").args(["ls-tree", "--name-only", "HEAD"]).current_dir(root()).output();
    // A copy without its history has no tree to look at.
    let Some(listed) = listed.ok().filter(|l| l.status.success()) else { return };
    for name in String::from_utf8_lossy(&listed.stdout).lines() {
        let code = ["Cargo.toml", "Cargo.lock", "src", "tests", "scripts"];
        let pages = ["README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"];
        let known = code.contains(&name) || pages.contains(&name);
        assert!(known || name.starts_with('.'), "{name} at the top level");
    }
}
