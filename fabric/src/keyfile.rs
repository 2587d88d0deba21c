//! Files with a key: 64 hexadecimal digits that only their owner may read.

use std::{fs, os::unix::fs::PermissionsExt, path::Path};

use strake_proto::{Code, Error, Result};

/// The key in a file. Errors name the file and what is wrong with it.
pub fn read(path: &Path) -> Result<[u8; 32]> {
    let what = |e: Error| e.context(format!("key file {}", path.display()));
    let invalid = |m: &str| what(Error::new(Code::Inval, m));
    let meta = fs::metadata(path).map_err(|e| what(e.into()))?;
    if meta.permissions().mode() & 0o077 != 0 {
        return Err(invalid("is readable by others; run chmod 600 on it"));
    }
    let text = fs::read_to_string(path).map_err(|e| what(e.into()))?;
    decode_hex(text.trim()).ok_or_else(|| invalid("is not 64 hexadecimal digits"))
}

/// 64 hexadecimal digits.
pub fn decode_hex(s: &str) -> Option<[u8; 32]> {
    if s.len() != 64 || !s.is_ascii() {
        return None;
    }
    let mut key = [0u8; 32];
    for (i, b) in key.iter_mut().enumerate() {
        *b = u8::from_str_radix(&s[2 * i..2 * i + 2], 16).ok()?;
    }
    Some(key)
}
