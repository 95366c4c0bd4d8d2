//! The token file. Rule a change could break: it is 0600 and ours, and its content is never in an error text.

use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use crate::error::{Code, Error, Result};
use crate::http::guard::{TOKEN_BYTES_MAX, Token};

/// Reads the token of `path`.
///
/// # Errors
/// [`Code::BadField`] when it is not there, not ours, open to others, or holds no token.
pub fn read(path: &Path) -> Result<Token> {
    let wrong =
        |why: &dyn std::fmt::Display| Error::new(Code::BadField, format!("token file {}: {why}", path.display()));
    let file = std::fs::File::open(path).map_err(|e| wrong(&e))?;
    let about = file.metadata().map_err(|e| wrong(&e))?;
    if about.mode() & 0o077 != 0 {
        return Err(wrong(&format!("others can read it (mode {:o}), it must be 600", about.mode() & 0o777)));
    }
    if about.uid() != rustix::process::geteuid().as_raw() {
        return Err(wrong(&"it belongs to another user"));
    }
    let mut text = String::new();
    file.take(TOKEN_BYTES_MAX as u64 + 64).read_to_string(&mut text).map_err(|e| wrong(&e))?;
    Token::parse(text.trim()).map_err(|e| wrong(&e))
}

/// Makes `path` with a fresh token, 0600, and never overwrites one.
///
/// # Errors
/// When it exists or cannot be written.
pub fn create(path: &Path) -> Result<()> {
    let wrong = |e: std::io::Error| Error::new(Code::BadField, format!("token file {}: {e}", path.display()));
    let mut file = std::fs::File::options().write(true).create_new(true).mode(0o600).open(path).map_err(wrong)?;
    writeln!(file, "{}", secret()).map_err(wrong)?;
    file.sync_all().map_err(wrong)
}

/// 244 bits of the kernel's randomness as 64 hex digits.
#[must_use]
pub fn secret() -> String {
    format!("{}{}", crate::ids::random_uuid().simple(), crate::ids::random_uuid().simple())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_token_file_is_private_made_once_and_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        assert!(read(&path).is_err());
        create(&path).unwrap();
        assert!(create(&path).is_err());
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(read(&path).unwrap().matches(text.trim().as_bytes()));
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        let error = read(&path).unwrap_err();
        assert!(error.text().contains("640") && !error.text().contains(text.trim()));
        assert_ne!(secret(), secret());
    }
}
