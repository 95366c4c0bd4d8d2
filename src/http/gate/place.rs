//! Private Unix sockets of the state directory. Rule a change could break: the directory is 0700 and the sockets 0600
//! before anyone can connect, and a path over what `sockaddr_un` holds works too.

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Longest path that fits `sockaddr_un` with its final NUL, in bytes.
const PATH_BYTES_MAX: usize = 107;

/// Where a socket lies, by a path that is short enough.
#[derive(Debug)]
pub struct Place {
    short: PathBuf,
    real: PathBuf,
    /// Keeps `/proc/self/fd/N` of `short` alive.
    _dir: Option<OwnedFd>,
}

impl Place {
    /// The place at `path`; makes its directory private.
    ///
    /// # Errors
    /// When the directory cannot be opened or made private.
    pub fn new(path: &Path) -> Result<Self> {
        let wrong = |e: std::io::Error| Error::internal(format!("socket {}: {e}", path.display()));
        let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(Error::internal(format!("socket {}: not a file in a directory", path.display())));
        };
        let mode = std::fs::metadata(dir).map_err(wrong)?.permissions().mode();
        if mode & 0o077 != 0 {
            std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o700)).map_err(wrong)?;
        }
        if path.as_os_str().len() <= PATH_BYTES_MAX {
            return Ok(Self { short: path.to_owned(), real: path.to_owned(), _dir: None });
        }
        use rustix::fs::{Mode, OFlags};
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(dir, flags, Mode::empty()).map_err(|e| wrong(e.into()))?;
        let short = Path::new("/proc/self/fd").join(fd.as_raw_fd().to_string()).join(name);
        Ok(Self { short, real: path.to_owned(), _dir: Some(fd) })
    }

    /// The path for bind and connect.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.short
    }

    /// Removes what an earlier server left.
    ///
    /// # Errors
    /// When something is there that cannot be removed.
    pub fn clear(&self) -> Result<()> {
        match std::fs::remove_file(&self.real) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::internal(format!("socket {}: {e}", self.real.display())))
            }
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Lets only our own uid connect; the directory is private already.
    ///
    /// # Errors
    /// When the mode cannot be set.
    pub fn make_private(&self) -> Result<()> {
        std::fs::set_permissions(&self.short, std::fs::Permissions::from_mode(0o600))
            .map_err(|e| Error::internal(format!("socket {}: {e}", self.real.display())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_under_a_long_path_can_be_bound_and_reached() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("d".repeat(100)).join("e".repeat(100));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o755)).unwrap();
        let place = Place::new(&dir.join("http.sock")).unwrap();
        let listener = std::os::unix::net::UnixListener::bind(place.path()).unwrap();
        place.make_private().unwrap();
        assert!(std::os::unix::net::UnixStream::connect(place.path()).is_ok());
        assert_eq!(std::fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(std::fs::metadata(dir.join("http.sock")).unwrap().permissions().mode() & 0o777, 0o600);
        drop(listener);
        place.clear().unwrap();
        place.clear().unwrap();
        assert!(!dir.join("http.sock").exists());
    }
}
