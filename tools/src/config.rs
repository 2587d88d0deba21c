//! One configuration format for every role: TOML. Flags override it; an unknown key is an error
//! that names its line.

use std::{borrow::Cow, fs, path::Path};

use serde::de::DeserializeOwned;
use strake_proto::{Code, Error, Result};
use strake_runtime::ClientKey;
pub use strake_runtime::keyfile::{decode_hex, read as read_key, read_client};
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

/// Values of flags, as `section.key = value`, which replace those of the file.
pub type Overrides = Vec<(&'static str, &'static str, toml::Value)>;

fn invalid(message: String) -> Error {
    Error::new(Code::Inval, message)
}

/// Reads `path` (or starts from nothing) and lets the flags override it.
pub fn load<T: DeserializeOwned>(path: Option<&Path>, overrides: Overrides) -> Result<T> {
    let (name, text) = match path {
        Some(p) => {
            let text = fs::read_to_string(p)
                .map_err(|e| Error::from(e).context(format!("config {}", p.display())))?;
            (p.display().to_string(), text)
        }
        None => ("flags".to_string(), String::new()),
    };
    parse(&name, &text, overrides)
}

/// As [`load`], from text; `name` is for messages.
pub fn parse<T: DeserializeOwned>(name: &str, text: &str, overrides: Overrides) -> Result<T> {
    let values: Vec<String> = overrides.iter().map(|(_, _, value)| value.to_string()).collect();
    let mut file = DeTable::parse(text).map_err(|e| located(name, text, &e))?;
    // Values of flags are put into the file's own tree, which knows the lines: an unknown key is
    // found with its line whether or not the file alone would be complete.
    for ((section, key, _), value) in overrides.iter().zip(&values) {
        let into = if section.is_empty() {
            file.get_mut()
        } else {
            let empty = || of_flags(DeValue::Table(DeTable::new()));
            let entry =
                file.get_mut().entry(of_flags(Cow::Borrowed(*section))).or_insert_with(empty);
            match entry.get_mut() {
                DeValue::Table(t) => t,
                _ => return Err(invalid(format!("{name}: '{section}' must be a section"))),
            }
        };
        let value = DeValue::parse(value)
            .map_err(|e| invalid(format!("{key}: {}", e.message())))?
            .into_inner();
        into.insert(of_flags(Cow::Borrowed(*key)), of_flags(value));
    }
    T::deserialize(toml::de::Deserializer::from(file)).map_err(|e| located(name, text, &e))
}

/// A span outside the file.
fn of_flags<T>(value: T) -> Spanned<T> {
    Spanned::new(usize::MAX..usize::MAX, value)
}

fn located(name: &str, text: &str, e: &toml::de::Error) -> Error {
    match e.span() {
        Some(span) if !text.is_empty() && span.start <= text.len() => {
            let line = text.as_bytes()[..span.start].iter().filter(|b| **b == b'\n').count() + 1;
            invalid(format!("{name}:{line}: {}", e.message()))
        }
        _ => invalid(format!("{name}: {}", e.message())),
    }
}

/// The log filter: `STRAKE_LOG`, or else the configuration.
pub fn log_filter(configured: &str) -> Result<String> {
    match std::env::var("STRAKE_LOG") {
        Ok(filter) if !filter.is_empty() => {
            check_log(&filter).map_err(|e| e.context("STRAKE_LOG")).map(|()| filter)
        }
        _ => check_log(configured).map(|()| configured.to_string()),
    }
}

/// `EINVAL` for a log filter that would not show what was meant: each part must be a level or
/// `MODULE=LEVEL`.
fn check_log(filter: &str) -> Result<()> {
    let level = |s: &str| {
        let named = ["off", "error", "warn", "info", "debug", "trace"]
            .iter()
            .any(|l| s.eq_ignore_ascii_case(l));
        named || matches!(s, "0" | "1" | "2" | "3" | "4" | "5")
    };
    for part in filter.split(',').map(str::trim) {
        // A single word would be taken for a module, with everything it logs.
        let good = match part.rsplit_once('=') {
            Some((module, l)) => !module.is_empty() && level(l),
            None => level(part),
        };
        if !good {
            let m = format!(
                "log filter '{part}': expected error, warn, info, debug, trace, off, or \
                 MODULE=LEVEL, separated by commas"
            );
            return Err(invalid(m));
        }
    }
    match tracing_subscriber::EnvFilter::try_new(filter) {
        Ok(_) => Ok(()),
        Err(e) => Err(invalid(format!("log filter '{filter}': {e}"))),
    }
}

/// Writes a key file that only its owner may read. Refuses to replace one.
pub fn write_key(path: &Path, key: &[u8; 32]) -> Result<()> {
    let hex = hex::encode(key);
    write_private(path, &format!("{hex}\n"))
}

/// Writes the client key file, or adds what a file of an older version lacks. `EEXIST` for a file
/// of another cluster. Returns whether anything was written.
pub fn write_client_key(path: &Path, key: &ClientKey) -> Result<bool> {
    let about = |e: std::io::Error| Error::from(e).context(format!("key file {}", path.display()));
    if !path.try_exists().map_err(about)? {
        return write_private(path, &key.text()).map(|()| true);
    }
    let had = read_client(path)?;
    if had.key != key.key {
        let m = format!(
            "key file {}: belongs to another cluster; remove it, or name another file",
            path.display()
        );
        return Err(Error::new(Code::Exist, m));
    }
    if had == *key {
        return Ok(false);
    }
    let mut new = path.as_os_str().to_os_string();
    new.push(format!(".{}.new", std::process::id()));
    let new = Path::new(&new);
    let renewed =
        write_private(new, &key.text()).and_then(|()| fs::rename(new, path).map_err(about));
    if renewed.is_err() {
        let _ = fs::remove_file(new);
    }
    renewed.map(|()| true)
}

/// Writes a file that must not exist. Only its owner may read it.
pub fn write_private(path: &Path, text: &str) -> Result<()> {
    use std::{io::Write, os::unix::fs::OpenOptionsExt};
    let mut f = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(|e| Error::from(e).context(format!("key file {}", path.display())))?;
    f.write_all(text.as_bytes())?;
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
        let f: File =
            parse("f", "[server]\nname = 'a'\n", vec![("server", "id", 7.into())]).unwrap();
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
        let e = parse::<File>("flags", "", vec![("server", "name", "x".into())]).unwrap_err();
        assert_eq!(e.message, "flags: missing field `id`");
    }

    #[test]
    fn a_key_that_a_flag_gives_hides_no_mistake_elsewhere() {
        #[derive(Deserialize, Debug)]
        #[serde(deny_unknown_fields)]
        struct Two {
            a: Server,
            b: Server,
        }
        let text = "[a]\nname = 'x'\n\n[b]\nid = 1\nnmae = 'x'\n";
        let e = parse::<Two>("f.toml", text, vec![("a", "id", 1.into())]).unwrap_err();
        assert!(e.message.starts_with("f.toml:6: unknown field `nmae`"), "{e}");
        let whole = text.replace("nmae", "name");
        let f: Two = parse("f.toml", &whole, vec![("a", "id", 1.into())]).unwrap();
        assert_eq!((f.a.id, f.b.name), (1, "x".to_string()));
        let e = parse::<Two>("f.toml", &whole, vec![("a", "id", "one".into())]).unwrap_err();
        assert!(e.message.starts_with("f.toml: invalid type"), "{e}");
    }

    #[test]
    fn log_filters() {
        for good in
            ["info", "WARN", "off", "strake_mds=debug,info", "strake_oss::server=trace, warn"]
        {
            check_log(good).unwrap();
        }
        for bad in
            ["", "inof", "strake_mds", "info,", "strake_mds=loud", "=info", "strake_mds[=info"]
        {
            assert_eq!(check_log(bad).unwrap_err().code, Code::Inval, "{bad}");
        }
    }

    #[test]
    fn a_clients_key_is_completed_and_never_replaced_by_anothers() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("client.key");
        let key = ClientKey::of(&[1; 32]);
        write_private(&path, &ClientKey::from(key.key).text()).unwrap();
        assert!(write_client_key(&path, &key).unwrap() && !write_client_key(&path, &key).unwrap());
        assert_eq!(read_client(&path).unwrap(), key);
        assert_eq!(
            write_client_key(&path, &ClientKey::of(&[2; 32])).unwrap_err().code,
            Code::Exist
        );
        assert!(read_key(&path).unwrap_err().message.contains("a client key"));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing else is left there");
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
