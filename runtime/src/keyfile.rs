//! Key files, which only their owner may read. The cluster key: 64 hexadecimal digits. The client
//! key: likewise, and in a second line the word `servers` and the public half of the key with which
//! servers sign.

use std::{fs, os::unix::fs::PermissionsExt, path::Path};

use ed25519_dalek::{SigningKey, VerifyingKey};
use strake_proto::{Code, Error, Result, cap::derive_key};

const SERVERS: &str = "servers ";

/// The key that only servers know, with which they recognize each other.
pub fn server_key(cluster_key: &[u8; 32]) -> [u8; 32] {
    derive_key(cluster_key, "strake server v1")
}

/// The key that servers and all clients know.
pub fn client_key(cluster_key: &[u8; 32]) -> [u8; 32] {
    derive_key(cluster_key, "strake client v1")
}

/// The key with which servers sign handshakes.
pub fn signing_key(cluster_key: &[u8; 32]) -> SigningKey {
    SigningKey::from_bytes(&derive_key(cluster_key, "strake signing v1"))
}

/// Everything that a client is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientKey {
    /// What clients prove to know.
    pub key: [u8; 32],
    /// The public half of the key with which servers sign. Files of older versions lack it.
    pub servers: Option<VerifyingKey>,
}

impl From<[u8; 32]> for ClientKey {
    fn from(key: [u8; 32]) -> ClientKey {
        ClientKey { key, servers: None }
    }
}

impl ClientKey {
    /// The client key of a cluster.
    pub fn of(cluster_key: &[u8; 32]) -> ClientKey {
        let servers = signing_key(cluster_key).verifying_key();
        ClientKey { key: client_key(cluster_key), servers: Some(servers) }
    }

    /// The text of its file.
    pub fn text(&self) -> String {
        let servers = self.servers.map(|s| format!("{SERVERS}{}\n", hex::encode(s.as_bytes())));
        format!("{}\n{}", hex::encode(self.key), servers.unwrap_or_default())
    }

    /// The inverse of [`ClientKey::text`].
    pub fn parse(text: &str) -> Option<ClientKey> {
        let mut lines = text.trim().lines().map(str::trim);
        let key = decode_hex(lines.next()?)?;
        let servers = match lines.next() {
            None => None,
            Some(line) => Some(
                VerifyingKey::from_bytes(&decode_hex(line.strip_prefix(SERVERS)?.trim())?).ok()?,
            ),
        };
        lines.next().is_none().then_some(ClientKey { key, servers })
    }
}

/// The key in a file. Errors name the file and what is wrong with it.
pub fn read(path: &Path) -> Result<[u8; 32]> {
    let text = private(path)?;
    decode_hex(text.trim()).ok_or_else(|| match ClientKey::parse(&text) {
        Some(_) => invalid(path, "is a client key; a server needs the cluster key here"),
        None => invalid(path, "is not 64 hexadecimal digits"),
    })
}

/// As [`read`], for a client's key file.
pub fn read_client(path: &Path) -> Result<ClientKey> {
    let what = "is not 64 hexadecimal digits and, in a second line, `servers` with 64 more";
    ClientKey::parse(&private(path)?).ok_or_else(|| invalid(path, what))
}

fn about(path: &Path, e: impl Into<Error>) -> Error {
    e.into().context(format!("key file {}", path.display()))
}

fn invalid(path: &Path, m: &str) -> Error {
    about(path, Error::new(Code::Inval, m))
}

fn private(path: &Path) -> Result<String> {
    let meta = fs::metadata(path).map_err(|e| about(path, e))?;
    if meta.permissions().mode() & 0o077 != 0 {
        return Err(invalid(path, "can be read by other users; run chmod 600 on it"));
    }
    fs::read_to_string(path).map_err(|e| about(path, e))
}

/// 64 hexadecimal digits.
pub fn decode_hex(s: &str) -> Option<[u8; 32]> {
    let mut key = [0; 32];
    hex::decode_to_slice(s, &mut key).ok()?;
    Some(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn client_keys_as_text() {
        let key = ClientKey::of(&[1; 32]);
        assert_eq!(ClientKey::parse(&key.text()), Some(key));
        let old = ClientKey { servers: None, ..key };
        assert_eq!(old.text().len(), 65, "a former version's file");
        assert_eq!(ClientKey::parse(old.text().trim()), Some(old));
        let text = key.text();
        for bad in
            ["", "servers", &text.replace("servers", "server"), &text[..80], &format!("{text}x\n")]
        {
            assert_eq!(ClientKey::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn the_public_half_is_as_documented() {
        // Computed by an independent implementation: HMAC-SHA256 of Python, then Ed25519 of
        // OpenSSL.
        let public = ClientKey::of(&[1; 32]).servers.unwrap();
        assert_eq!(hex::encode(public.as_bytes()), PUBLIC);
    }

    const PUBLIC: &str = "be1b62cfdda7a4e7ef133a36fe07528945ecbad763882cc6e70672b26f118b02";
}
