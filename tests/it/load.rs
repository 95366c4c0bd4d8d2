//! The load tool from outside: its exit code, its JSON, its page.

use std::process::{Command, Output};

use serde_json::Value;

fn load(scenario: &str, more: &[&str]) -> (Output, Value, String) {
    let dir = tempfile::tempdir().unwrap();
    let (json, html) = (dir.path().join("out.json"), dir.path().join("out.html"));
    let output = Command::new(env!("CARGO_BIN_EXE_beebox-load"))
        .arg(scenario)
        .args(["--spawn", "--quiet", "--program", env!("CARGO_BIN_EXE_beebox-chatd")])
        .arg("--box")
        .arg(dir.path().join("box"))
        .arg("--json")
        .arg(&json)
        .arg("--html")
        .arg(&html)
        .args(more)
        .output()
        .unwrap();
    let figures = std::fs::read(&json).ok().and_then(|b| serde_json::from_slice(&b).ok()).unwrap_or(Value::Null);
    (output, figures, std::fs::read_to_string(&html).unwrap_or_default())
}

fn words(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn a_good_run_ends_with_0_and_tells_the_same_in_words_json_and_html() {
    let (output, figures, page) = load("one-phone", &["--duration", "3"]);
    assert_eq!(output.status.code(), Some(0), "{}", words(&output));
    assert_eq!(figures["good"], true);
    assert_eq!(figures["checker"]["violations"], serde_json::json!([]));
    let sends = figures["steps"].as_array().unwrap().iter().find(|s| s["step"] == "send").unwrap();
    assert!(sends["count"].as_u64().unwrap() >= 2 && sends["p99Ms"].as_f64().unwrap() > 0.0, "{sends}");
    assert!(words(&output).contains("violations = 0"));
    assert!(page.contains("<svg") && page.contains("one-phone") && !page.contains("<script"));
}

#[test]
fn failed_steps_end_with_1_and_a_scenario_that_cannot_be_with_2() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let lost = write(
        "lost.json",
        r#"{"name":"lost","duration_s":1,"sessions":0,"groups":[
            {"name":"g","clients":1,"session":"main","per_s":2,"loop":[{"do":"get","path":"/no/such/path"}]}]}"#,
    );
    let (output, figures, _) = load(&lost, &[]);
    assert_eq!(output.status.code(), Some(1), "{}", words(&output));
    assert!(figures["errors"].as_u64().unwrap() > 0 && words(&output).contains("first error of g / get: 404"));

    let wrong = write("wrong.json", r#"{"name":"wrong","groups":[{"name":"g","clients":1,"loop":[{"do":"dance"}]}]}"#);
    let (output, figures, _) = load(&wrong, &[]);
    assert_eq!((output.status.code(), figures), (Some(2), Value::Null), "{}", words(&output));
    let (output, ..) = load("no-such-scenario", &[]);
    assert_eq!(output.status.code(), Some(2), "{}", words(&output));
}
