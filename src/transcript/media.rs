//! (room being built)

/// `bytes` as standard base64 with padding.
#[must_use]
pub fn encode_base64(bytes: &[u8]) -> String {
    base64_simd::STANDARD.encode_to_string(bytes)
}
