//! The program: flags, start, wait for a signal, exit code.

fn main() {
    let mut args = std::env::args_os().skip(1);
    if args.next().is_some_and(|command| command == "agent") {
        std::process::exit(beebox_chatd::agent::embedded::main(args.collect()));
    }
}
