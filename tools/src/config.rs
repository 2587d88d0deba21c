//! One configuration format for every role: TOML, flags override it, an unknown key is an error with its line.

use std::{fs, path::Path};

use serde::de::DeserializeOwned;
use strake_proto::{Code, Error, Result};

/// What flags say, as `section.key = value` pairs that replace what the file says.
pub type Overrides = Vec<(&'static str, &'static str, toml::Value)>;

fn invalid(message: String) -> Error {
    Error::new(Code::Inval, message)
}

/// Reads `path` (or starts from nothing) and lets the flags override it.
pub fn load<T: DeserializeOwned>(path: Option<&Path>, overrides: Overrides) -> Result<T> {
    let (name, text) = match path {
        Some(p) => {
            let text = fs::read_to_string(p).map_err(|e| Error::from(e).context(format!("config {}", p.display())))?;
            (p.display().to_string(), text)
        }
        None => ("flags".to_string(), String::new()),
    };
    parse(&name, &text, overrides)
}

/// As [`load`], from text; `name` is for messages.
pub fn parse<T: DeserializeOwned>(name: &str, text: &str, overrides: Overrides) -> Result<T> {
    // The file alone first: only its text has lines to point at. What it lacks may still come from flags.
    if let Err(e) = toml::from_str::<T>(text)
        && !e.message().starts_with("missing field")
    {
        return Err(located(name, text, &e));
    }
    let mut table: toml::Table = toml::from_str(text).map_err(|e| located(name, text, &e))?;
    for (section, key, value) in overrides {
        let into = if section.is_empty() {
            &mut table
        } else {
            let entry = table.entry(section).or_insert_with(|| toml::Value::Table(toml::Table::new()));
            entry.as_table_mut().ok_or_else(|| invalid(format!("{name}: '{section}' must be a section")))?
        };
        into.insert(key.to_string(), value);
    }
    T::deserialize(table).map_err(|e| invalid(format!("{name}: {}", e.message())))
}

fn located(name: &str, text: &str, e: &toml::de::Error) -> Error {
    match e.span() {
        Some(span) => {
            let line = text[..span.start.min(text.len())].matches('\n').count() + 1;
            invalid(format!("{name}:{line}: {}", e.message()))
        }
        None => invalid(format!("{name}: {}", e.message())),
    }
}

/// A configuration file of each kind as text, read and checked as its program does at its start; `kind` chooses which.
pub fn read_text(kind: u8, text: &str) -> Result<()> {
    match kind % 4 {
        0 => crate::serve::check_mds(text),
        1 => crate::serve::check_oss(text),
        2 => crate::mount::check(text),
        _ => crate::dev::check(text),
    }
}

/// A key file: 64 hexadecimal digits. Refuses one that others may read.
pub fn read_key(path: &Path) -> Result<[u8; 32]> {
    use std::os::unix::fs::PermissionsExt;
    let what = |e: Error| e.context(format!("key file {}", path.display()));
    let meta = fs::metadata(path).map_err(|e| what(e.into()))?;
    if meta.permissions().mode() & 0o077 != 0 {
        return Err(what(invalid("is readable by others; run chmod 600 on it".into())));
    }
    let text = fs::read_to_string(path).map_err(|e| what(e.into()))?;
    decode_hex(text.trim()).ok_or_else(|| what(invalid("is not 64 hexadecimal digits".into())))
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

/// Writes a key that only its owner may read. Refuses to replace one.
pub fn write_key(path: &Path, key: &[u8; 32]) -> Result<()> {
    use std::{io::Write, os::unix::fs::OpenOptionsExt};
    let hex: String = key.iter().map(|b| format!("{b:02x}")).collect();
    let mut f = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(|e| Error::from(e).context(format!("key file {}", path.display())))?;
    f.write_all(hex.as_bytes())?;
    f.write_all(b"\n")?;
    Ok(f.sync_all()?)
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Deserialize, Debug, PartialEq)]
    #[serde(deny_unknown_fields)]
    struct File {
        server: Server,
    }
    #[derive(Deserialize, Debug, PartialEq)]
    #[serde(deny_unknown_fields)]
    struct Server {
        id: u32,
        #[serde(default)]
        name: String,
    }

    #[test]
    fn flags_override_and_complete_the_file() {
        let f: File = parse("f", "[server]\nname = 'a'\n", vec![("server", "id", 7.into())]).unwrap();
        assert_eq!(f, File { server: Server { id: 7, name: "a".into() } });
        let f: File = parse("f", "[server]\nid = 1\n", vec![("server", "id", 9.into())]).unwrap();
        assert_eq!(f.server.id, 9);
    }

    #[test]
    fn an_unknown_key_is_an_error_with_its_line() {
        let e = parse::<File>("f.toml", "[server]\nid = 1\nnmae = 'x'\n", vec![]).unwrap_err();
        assert!(e.message.starts_with("f.toml:3: unknown field `nmae`"), "{e}");
        let e = parse::<File>("f.toml", "[server]\nid = 'x'\n", vec![]).unwrap_err();
        assert!(e.message.starts_with("f.toml:2: "), "{e}");
        let e = parse::<File>("f.toml", "[server\n", vec![]).unwrap_err();
        assert!(e.message.starts_with("f.toml:1: "), "{e}");
        let e = parse::<File>("f.toml", "[server]\n", vec![]).unwrap_err();
        assert!(e.message.contains("missing field `id`"), "{e}");
    }

    #[test]
    fn keys_are_private_and_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("k");
        write_key(&path, &[0xa5; 32]).unwrap();
        assert_eq!(read_key(&path).unwrap(), [0xa5; 32]);
        assert!(write_key(&path, &[1; 32]).is_err());
        fs::write(&path, "12").unwrap();
        assert!(read_key(&path).unwrap_err().message.contains("64 hexadecimal"));
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
        assert!(read_key(&path).unwrap_err().message.contains("chmod 600"));
    }
}
