//! Newtypes for every id that crosses a room: parsed once at the edge, printed alike in logs, thread names and the API.
//!
//! Leaves to others: what an id refers to. Rule a change could break: a value of these types is always inside its
//! alphabet and length, so it may go into a path, a header or a thread name without another check.

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Longest session id or uuid, in bytes (WIRE, first paragraph).
pub const ID_BYTES_MAX: usize = 64;
/// Longest `messageId`, in bytes (WIRE, first paragraph).
pub const MESSAGE_ID_BYTES_MAX: usize = 128;

/// Why a text is not an id; says the allowed range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadId(&'static str);

impl fmt::Display for BadId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for BadId {}

/// True for `[A-Za-z0-9_-]{1,64}`, the alphabet of session ids and uuids.
#[must_use]
pub fn is_plain_id(text: &str) -> bool {
    (1..=ID_BYTES_MAX).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-')
}

/// A random UUID (version 4) from the kernel's generator, asked by the system call itself: a static binary in an empty
/// root has neither the C library's wrapper nor `/dev/urandom`.
///
/// # Panics
/// If the kernel has no randomness to give, which no Linux since 3.17 says once it has booted.
#[must_use]
pub fn random_uuid() -> uuid::Uuid {
    let mut bytes = [0; 16];
    let mut have = 0;
    while have < bytes.len() {
        match rustix::rand::getrandom(&mut bytes[have..], rustix::rand::GetRandomFlags::empty()) {
            Ok(more) => have += more,
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => panic!("the kernel gives no random bytes: {e}"),
        }
    }
    uuid::Builder::from_random_bytes(bytes).into_uuid()
}

macro_rules! plain_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(Arc<str>);

        impl $name {
            /// Parses `[A-Za-z0-9_-]{1,64}`.
            ///
            /// # Errors
            /// [`BadId`] for anything else.
            pub fn parse(text: &str) -> Result<Self, BadId> {
                if is_plain_id(text) {
                    Ok(Self(text.into()))
                } else {
                    Err(BadId("an id is 1 to 64 of A-Z a-z 0-9 _ -"))
                }
            }

            /// A fresh random id (UUID version 4, lower case with hyphens).
            #[must_use]
            pub fn fresh() -> Self {
                Self(random_uuid().to_string().into())
            }

            /// The id as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }

            /// Its first eight bytes, for thread names and log lines.
            #[must_use]
            pub fn short(&self) -> &str {
                &self.0[..self.0.len().min(8)]
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl TryFrom<String> for $name {
            type Error = BadId;
            fn try_from(text: String) -> Result<Self, BadId> {
                Self::parse(&text)
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0.to_string()
            }
        }

        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }
    };
}

plain_id!(
    /// One conversation; names its transcript file.
    SessionId
);
plain_id!(
    /// One accepted message; becomes the uuid of the transcript's user line when it leads its turn.
    MessageUuid
);
plain_id!(
    /// One turn: the uuid of its first message, or fresh for a turn that the agent starts itself.
    TurnId
);

impl TurnId {
    /// The turn that `first` leads.
    #[must_use]
    pub fn of(first: &MessageUuid) -> Self {
        Self(first.0.clone())
    }
}

/// The client's own key of a send, 1 to 128 printable ASCII bytes; repeats of it are one message.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
#[serde(transparent)]
pub struct MessageId(Arc<str>);

impl MessageId {
    /// Parses 1 to 128 printable ASCII bytes.
    ///
    /// # Errors
    /// [`BadId`] for anything else.
    pub fn parse(text: &str) -> Result<Self, BadId> {
        if (1..=MESSAGE_ID_BYTES_MAX).contains(&text.len()) && text.bytes().all(|b| (0x20..0x7f).contains(&b)) {
            Ok(Self(text.into()))
        } else {
            Err(BadId("a messageId is 1 to 128 printable ASCII characters"))
        }
    }

    /// The id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Number of a run, rising over the life of the server; reports of an old run are ignored by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RunNo(pub u64);

impl fmt::Display for RunNo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "run {}", self.0)
    }
}

/// Id of a kept event: positive, rising in commit order.
pub type EventId = i64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_keep_to_their_alphabet_and_length() {
        for good in ["a", "A-Z_0", &"x".repeat(64)] {
            assert!(SessionId::parse(good).is_ok(), "{good}");
        }
        for bad in ["", ".", "a/b", "a.b", "%00", "ä", "a b", &"x".repeat(65)] {
            assert!(SessionId::parse(bad).is_err(), "{bad}");
        }
        assert!(MessageId::parse("any printable ~ text").is_ok());
        for bad in ["", "tab\t", "é", &"x".repeat(129)] {
            assert!(MessageId::parse(bad).is_err(), "{bad}");
        }
        assert_eq!(SessionId::fresh().as_str().len(), 36);
    }
}
