//! The wall clock, as the wire writes it, and the clock that nobody sets. Leaves deadlines to `std::time::Instant`.
//! Rule a change could break: every time that leaves the server is RFC 3339 UTC with exactly three decimals.

/// Milliseconds since 1970-01-01 UTC.
pub type UnixMs = i64;

/// The time now, as the wall clock has it: somebody may set it forward or back at any moment.
#[must_use]
pub fn now_ms() -> UnixMs {
    jiff::Timestamp::now().as_millisecond() + test_shift_ms()
}

/// Milliseconds since the machine was started, sleep included. Nobody can set this clock; it begins anew with each boot.
#[must_use]
pub fn since_boot_ms() -> i64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    now.tv_sec * 1000 + now.tv_nsec / 1_000_000
}

/// Which boot of the machine this is; empty where the kernel does not tell.
#[must_use]
pub fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").map(|id| id.trim().to_owned()).unwrap_or_default()
}

/// How far a test has set the wall clock off: the number in the file that `BEEBOX_CLOCK` names. Never in a release build.
fn test_shift_ms() -> i64 {
    static FILE: std::sync::OnceLock<Option<std::path::PathBuf>> = std::sync::OnceLock::new();
    if !cfg!(debug_assertions) {
        return 0;
    }
    let file = FILE.get_or_init(|| std::env::var_os("BEEBOX_CLOCK").map(std::path::PathBuf::from));
    let text = file.as_ref().and_then(|file| std::fs::read_to_string(file).ok());
    text.and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// `ms` as `2026-12-01T02:20:18.495Z`; a value outside the years jiff knows reads as the nearest bound.
#[must_use]
pub fn rfc3339(ms: UnixMs) -> String {
    let bound = jiff::Timestamp::MAX.as_millisecond();
    let stamp = jiff::Timestamp::from_millisecond(ms.clamp(-bound, bound)).unwrap_or(jiff::Timestamp::UNIX_EPOCH);
    format!("{stamp:.3}")
}

/// `ms` as an HTTP date, `Tue, 01 Dec 2026 02:20:18 GMT`.
#[must_use]
pub fn http_date(ms: UnixMs) -> String {
    let bound = jiff::Timestamp::MAX.as_millisecond();
    let stamp = jiff::Timestamp::from_millisecond(ms.clamp(-bound, bound)).unwrap_or(jiff::Timestamp::UNIX_EPOCH);
    jiff::fmt::rfc2822::DateTimePrinter::new().timestamp_to_rfc9110_string(&stamp).unwrap_or_default()
}

/// The milliseconds that an RFC 3339 text names; none when it is no time.
#[must_use]
pub fn from_rfc3339(text: &str) -> Option<UnixMs> {
    text.parse::<jiff::Timestamp>().ok().map(jiff::Timestamp::as_millisecond)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_utc_with_milliseconds() {
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(rfc3339(1_796_091_618_495), "2026-12-01T02:20:18.495Z");
        assert!(rfc3339(i64::MAX).ends_with('Z'));
        assert_eq!(http_date(1_796_091_618_495), "Tue, 01 Dec 2026 02:20:18 GMT");
        assert_eq!(from_rfc3339("2026-12-01T02:20:18.495Z"), Some(1_796_091_618_495));
        assert_eq!(from_rfc3339("yesterday"), None);
    }
}
