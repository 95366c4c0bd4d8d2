//! The program: flags, start, wait for a signal, exit code. Exit 0 after SIGTERM or SIGINT, 2 for a bad setting or a
//! port in use, 1 otherwise, each with one clear line on stderr.

use std::io::Write as _;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use beebox_chatd::app::App;
use beebox_chatd::config::{Cli, Command, ServeFlags};
use beebox_chatd::error::{Code, Error, Result};
use beebox_chatd::threads::{self, Doing, Name, OnPanic};
use clap::Parser as _;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGXFSZ};

fn main() -> ExitCode {
    let mut args = std::env::args_os();
    // The agent parses its own flags: they are the real agent's, not ours.
    if args.nth(1).is_some_and(|word| word == "agent") {
        std::process::exit(beebox_chatd::agent::embedded::main(args.collect()));
    }
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    let cli = Cli::parse();
    let done = match cli.command {
        None => serve(cli.serve),
        Some(Command::Serve(flags)) => serve(flags),
        Some(Command::Agent { args }) => std::process::exit(beebox_chatd::agent::embedded::main(args)),
        Some(Command::Token { file, replace }) => beebox_chatd::tools::token(&file, replace),
        Some(Command::Login { box_dir }) => beebox_chatd::tools::login(&box_dir),
        Some(Command::Tail { box_dir, after }) => beebox_chatd::tools::tail(&box_dir, after.as_deref()),
        Some(Command::Send { box_dir, session, message }) => beebox_chatd::tools::send(&box_dir, &session, &message),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            let _ = writeln!(std::io::stderr(), "beebox-chatd: {e}");
            ExitCode::from(if e.code() == Code::BadField { 2 } else { 1 })
        }
    }
}

fn serve(flags: ServeFlags) -> Result<()> {
    threads::list_this_thread(const { Name::fixed("main") });
    let print_config = flags.print_config;
    let config = flags.into_config()?;
    if print_config {
        writeln!(std::io::stdout(), "{config:#?}")?;
        return Ok(());
    }
    // Before any thread exists, so that a signal during the start is not lost.
    let signals = signal_hook::iterator::Signals::new([SIGTERM, SIGINT, SIGQUIT, SIGHUP])?;
    // A limit on file sizes is a full disk, which is answered; by default the kernel would end the program.
    signal_hook::flag::register(SIGXFSZ, Arc::default())?;
    let token_file = config.token_file.clone();
    let app = App::start(config)?;
    let asked = Arc::new(AtomicUsize::new(0));
    let (down, wait_for_down) = beebox_chatd::sync::bounded::<()>(1);
    watch_signals(signals, app.dump_page(), app.token_reader(), asked.clone(), down)?;

    let address = app.address();
    let mut out = std::io::stdout();
    writeln!(out, "listening on http://{address}")?;
    out.flush()?;
    beebox_chatd::supervisor::notify("READY=1");
    if token_file.is_some() {
        log::info!("every route but /healthz needs the bearer token");
    }

    {
        let _at = threads::doing(Doing::WaitSignal);
        // The sender lives in the signals thread: a disconnect would be its panic, and then we go down too.
        let _ = wait_for_down.recv();
    }
    beebox_chatd::supervisor::notify("STOPPING=1");
    let hurry = move || asked.load(Ordering::Relaxed) > 1;
    if app.shut_down(&hurry) { Ok(()) } else { Err(Error::internal("not everything ended in time")) }
}

fn watch_signals(
    mut signals: signal_hook::iterator::Signals,
    dump: impl Fn() -> String + Send + 'static,
    read_token: impl Fn() + Send + 'static,
    asked: Arc<AtomicUsize>,
    down: beebox_chatd::sync::Sender<()>,
) -> Result<()> {
    threads::spawn(const { Name::fixed("signals") }, threads::SMALL_STACK_BYTES, OnPanic::Contain, move || {
        let _at = threads::doing(Doing::WaitSignal);
        for signal in signals.forever() {
            match signal {
                SIGQUIT => {
                    let _ = std::io::stderr().write_all(dump().as_bytes());
                }
                SIGHUP => read_token(),
                _ => {
                    asked.fetch_add(1, Ordering::Relaxed);
                    let _ = down.try_send(());
                }
            }
        }
    })?;
    Ok(())
}
