//! (room being built)
pub mod entry;
pub mod index;
pub mod line;
pub mod media;
pub mod page;
pub mod strip;
