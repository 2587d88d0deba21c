//! The handshake: it agrees on the wire version and the cluster, and both ends prove that they know
//! the key of the dialer's role.
//!
//! Four messages, specified in `docs/formats.md`: hello (dialer), welcome with the listener's
//! proof, the dialer's proof, verdict. A proof is HMAC-SHA256 under the role's key over its side's
//! name and all bytes sent before it, which contain both nonces; so no proof can be replayed or
//! reflected. Every refusal is sent to the other end as text.
//!
//! All clients share a key with the servers, so that key does not tell a server from another
//! client. A client that knows the servers' public key requires the listener to sign as well, which
//! only a server can.

use ed25519_dalek::{Signature, Signer as _};
use strake_proto::{
    Code, Error, Result, WIRE_VERSION, WIRE_VERSION_MIN,
    cap::{hmac_sha256, same_bytes},
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::{Identity, Role};

/// First bytes of hello and welcome.
pub const MAGIC: [u8; 8] = *b"STRAKEHS";
/// Length of a [`Hello`], bytes.
pub const HELLO_LEN: usize = 64;
/// Length of a [`Welcome`] without its text, bytes.
pub const WELCOME_LEN: usize = 96;
/// Length of the dialer's proof, bytes.
pub const PROOF_LEN: usize = 40;
/// Length of the listener's verdict on the proof, without its text, bytes.
pub const VERDICT_LEN: usize = 8;
/// Longest refusal text.
const MAX_TEXT: usize = 1024;

const DIALER: &[u8] = b"strake dialer v1";
const LISTENER: &[u8] = b"strake listener v1";
const SIGNATURE: &[u8] = b"strake signature v1";
/// Length of a signature, bytes.
pub const SIGNATURE_LEN: usize = 64;
/// Flags of hello and welcome: the cluster id is known; a signature is asked for (hello) or follows
/// (welcome).
const CLUSTER: u8 = 1;
const SIGNED: u8 = 2;

/// What one end brings to the handshake.
#[derive(Clone)]
pub struct Party {
    /// The keys it holds, and its role.
    pub identity: Identity,
    /// Id of the cluster; `None`: it is not known yet, and any is accepted.
    pub cluster: Option<[u8; 16]>,
    /// Random, for this handshake only.
    pub nonce: [u8; 32],
    /// Oldest and newest wire version it speaks.
    pub versions: (u16, u16),
}

impl Party {
    /// A party that speaks the wire versions of this program.
    pub fn new(identity: Identity, cluster: Option<[u8; 16]>, nonce: [u8; 32]) -> Party {
        Party { identity, cluster, nonce, versions: (WIRE_VERSION_MIN, WIRE_VERSION) }
    }

    fn key(&self, dialer: Role) -> Option<&[u8; 32]> {
        match dialer {
            Role::Client => Some(&self.identity.client_key),
            Role::Server => self.identity.server_key.as_ref(),
        }
    }
}

/// What both ends know afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// Wire version of the connection.
    pub version: u16,
    /// The dialer's role.
    pub role: Role,
}

/// The dialer's first message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Oldest and newest wire version that the dialer speaks.
    pub versions: (u16, u16),
    /// Role that it is going to prove.
    pub role: Role,
    /// Asks the listener to sign, if it can.
    pub signed: bool,
    /// Id of the cluster, where the dialer knows it.
    pub cluster: Option<[u8; 16]>,
    /// The dialer's random bytes.
    pub nonce: [u8; 32],
}

impl Hello {
    /// As it is sent.
    pub fn encode(&self) -> [u8; HELLO_LEN] {
        let mut b = [0; HELLO_LEN];
        b[0..8].copy_from_slice(&MAGIC);
        b[8..10].copy_from_slice(&self.versions.0.to_le_bytes());
        b[10..12].copy_from_slice(&self.versions.1.to_le_bytes());
        b[12] = match self.role {
            Role::Client => 1,
            Role::Server => 2,
        };
        b[14] = flags(self.cluster.is_some(), self.signed);
        b[16..32].copy_from_slice(&self.cluster.unwrap_or_default());
        b[32..64].copy_from_slice(&self.nonce);
        b
    }

    /// Reads what [`Hello::encode`] made. `Protocol`: another protocol, or an unknown role.
    pub fn decode(b: &[u8; HELLO_LEN]) -> Result<Hello> {
        check_magic(b)?;
        let role = match b[12] {
            1 => Role::Client,
            2 => Role::Server,
            r => {
                return Err(Error::new(
                    Code::Protocol,
                    format!("the handshake names an unknown role {r}"),
                ));
            }
        };
        Ok(Hello {
            versions: (u16::from_le_bytes([b[8], b[9]]), u16::from_le_bytes([b[10], b[11]])),
            role,
            signed: b[14] & SIGNED != 0,
            cluster: cluster_at(b),
            nonce: array_at(b, 32),
        })
    }
}

/// The listener's answer. A refusal has `version` 0 and is followed by `text` bytes of explanation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// Wire version of the connection.
    pub version: u16,
    /// 0, or the [`Code`] of a refusal.
    pub status: u16,
    /// Length of the explanation of a refusal, bytes.
    pub text: u16,
    /// A signature follows the verdict.
    pub signed: bool,
    /// Id of the cluster, where the listener knows it.
    pub cluster: Option<[u8; 16]>,
    /// The listener's random bytes.
    pub nonce: [u8; 32],
    /// Proof that the listener knows the key of the role.
    pub proof: [u8; 32],
}

impl Welcome {
    /// As it is sent.
    pub fn encode(&self) -> [u8; WELCOME_LEN] {
        let mut b = [0; WELCOME_LEN];
        b[0..8].copy_from_slice(&MAGIC);
        b[8..10].copy_from_slice(&self.version.to_le_bytes());
        b[10..12].copy_from_slice(&self.status.to_le_bytes());
        b[12..14].copy_from_slice(&self.text.to_le_bytes());
        b[14] = flags(self.cluster.is_some(), self.signed);
        b[16..32].copy_from_slice(&self.cluster.unwrap_or_default());
        b[32..64].copy_from_slice(&self.nonce);
        b[64..96].copy_from_slice(&self.proof);
        b
    }

    /// Reads what [`Welcome::encode`] made. `Protocol`: another protocol.
    pub fn decode(b: &[u8; WELCOME_LEN]) -> Result<Welcome> {
        check_magic(b)?;
        Ok(Welcome {
            version: u16::from_le_bytes([b[8], b[9]]),
            status: u16::from_le_bytes([b[10], b[11]]),
            text: u16::from_le_bytes([b[12], b[13]]),
            signed: b[14] & SIGNED != 0,
            cluster: cluster_at(b),
            nonce: array_at(b, 32),
            proof: array_at(b, 64),
        })
    }
}

fn check_magic(b: &[u8]) -> Result<()> {
    if b.starts_with(&MAGIC) {
        return Ok(());
    }
    Err(Error::new(
        Code::Protocol,
        "the other end does not speak StrakeFS (or is much older or newer)",
    ))
}

fn array_at<const N: usize>(b: &[u8], at: usize) -> [u8; N] {
    let mut a = [0; N];
    if let Some(from) = b.get(at..at + N) {
        a.copy_from_slice(from);
    }
    a
}

fn cluster_at<const N: usize>(b: &[u8; N]) -> Option<[u8; 16]> {
    (b[14] & CLUSTER != 0).then(|| array_at(b, 16))
}

fn flags(cluster: bool, signed: bool) -> u8 {
    let of = |is: bool, flag: u8| if is { flag } else { 0 };
    of(cluster, CLUSTER) | of(signed, SIGNED)
}

/// The highest version that both ends speak.
fn pick_version(ours: (u16, u16), theirs: (u16, u16)) -> Result<u16> {
    let (low, high) = (ours.0.max(theirs.0), ours.1.min(theirs.1));
    if low <= high && high > 0 {
        return Ok(high);
    }
    let m = format!(
        "no common wire version: the listener speaks {} to {}, the dialer {} to {}; upgrade the older one",
        ours.0, ours.1, theirs.0, theirs.1
    );
    Err(Error::new(Code::Protocol, m))
}

fn same_cluster(ours: Option<[u8; 16]>, theirs: Option<[u8; 16]>) -> Result<()> {
    match (ours, theirs) {
        (Some(a), Some(b)) if a != b => {
            let m = format!(
                "another cluster: the listener belongs to {}, the dialer to {}",
                hex::encode(a),
                hex::encode(b)
            );
            Err(Error::new(Code::Unauthenticated, m))
        }
        _ => Ok(()),
    }
}

/// The listener's check of a hello: gives the version and the key to prove.
fn judge<'a>(us: &'a Party, hello: &Hello) -> Result<(u16, &'a [u8; 32])> {
    let version = pick_version(us.versions, hello.versions)?;
    same_cluster(us.cluster, hello.cluster)?;
    let no_key = || {
        Error::new(
            Code::Unauthenticated,
            "the listener has no server key, so servers cannot connect to it",
        )
    };
    Ok((version, us.key(hello.role).ok_or_else(no_key)?))
}

fn broken(e: std::io::Error) -> Error {
    let mut e = Error::from(e);
    if e.code != Code::TimedOut {
        e.code = Code::Disconnected;
    }
    e.context("the connection broke during the handshake")
}

fn status(code: Code) -> u16 {
    code as u16
}

/// A status that the other end sent, with its text.
async fn refusal<S: AsyncRead + Unpin>(s: &mut S, status: u16, text: u16) -> Error {
    let mut b = vec![0; usize::from(text).min(MAX_TEXT)];
    let words = match s.read_exact(&mut b).await {
        Ok(_) => String::from_utf8_lossy(&b).into_owned(),
        Err(_) => "no reason given".into(),
    };
    Error::new(Code::from_wire(u32::from(status)), format!("refused by the other end: {words}"))
}

fn text_of(e: &Error) -> (u16, &[u8]) {
    let mut n = e.message.len().min(MAX_TEXT);
    while !e.message.is_char_boundary(n) {
        n -= 1;
    }
    (n as u16, &e.message.as_bytes()[..n])
}

/// `status, text length, reserved`, then `proof` if ok, else the text.
fn ending(result: &Result<&[u8]>) -> Vec<u8> {
    let (code, len, tail) = match result {
        Ok(proof) => (0, 0, *proof),
        Err(e) => {
            let (n, text) = text_of(e);
            (status(e.code), n, text)
        }
    };
    let mut b = Vec::with_capacity(8 + tail.len());
    b.extend_from_slice(&code.to_le_bytes());
    b.extend_from_slice(&len.to_le_bytes());
    b.extend_from_slice(&[0; 4]);
    b.extend_from_slice(tail);
    b
}

/// Reads `status, text length, reserved`; a refusal becomes its error.
async fn read_ending<S: AsyncRead + Unpin>(s: &mut S) -> Result<()> {
    let mut b = [0; VERDICT_LEN];
    s.read_exact(&mut b).await.map_err(broken)?;
    match u16::from_le_bytes([b[0], b[1]]) {
        0 => Ok(()),
        code => Err(refusal(s, code, u16::from_le_bytes([b[2], b[3]])).await),
    }
}

/// The dialer's side.
pub async fn dial<S: AsyncRead + AsyncWrite + Unpin>(s: &mut S, us: &Party) -> Result<Agreed> {
    let role = us.identity.role;
    let no_key = || {
        Error::new(
            Code::Unauthenticated,
            "this process must connect as a server but has no server key",
        )
    };
    let key = us.key(role).ok_or_else(no_key)?;
    let signer = us.identity.servers.as_ref();
    let signed = signer.is_some();
    let hello = Hello { versions: us.versions, role, signed, cluster: us.cluster, nonce: us.nonce }
        .encode();
    s.write_all(&hello).await.map_err(broken)?;

    let mut bytes = [0; WELCOME_LEN];
    s.read_exact(&mut bytes).await.map_err(broken)?;
    let welcome = Welcome::decode(&bytes)?;
    if welcome.status != 0 {
        return Err(refusal(s, welcome.status, welcome.text).await);
    }
    let judged = check_welcome(us, key, &hello, &bytes, &welcome);
    let proof = hmac_sha256(key, &[DIALER, &hello, &bytes]);
    s.write_all(&ending(&judged.as_ref().map(|()| &proof[..]).map_err(Clone::clone)))
        .await
        .map_err(broken)?;
    judged?;
    read_ending(s).await?;
    if let Some(servers) = signer {
        let mut signature = [0; SIGNATURE_LEN];
        s.read_exact(&mut signature).await.map_err(broken)?;
        let text = [SIGNATURE, &hello, &bytes, &proof].concat();
        servers
            .verify_strict(&text, &Signature::from_bytes(&signature))
            .map_err(|_| no_server("it signed with another key"))?;
    }
    Ok(Agreed { version: welcome.version, role })
}

/// The error for a peer that did not sign: one that holds only the key of all clients, or a server
/// that is older than its clients' key files.
fn no_server(why: &str) -> Error {
    let m = format!(
        "the listener knows this cluster's client key, but did not prove to be a server of it: \
         {why}. It may be an impostor that listens at this address. If it is an older version, \
         upgrade it; otherwise renew the key file (`strake key client`)"
    );
    Error::new(Code::Unauthenticated, m)
}

fn check_welcome(
    us: &Party,
    key: &[u8; 32],
    hello: &[u8; HELLO_LEN],
    bytes: &[u8; WELCOME_LEN],
    w: &Welcome,
) -> Result<()> {
    let want = hmac_sha256(key, &[LISTENER, hello, &bytes[..64]]);
    if !same_bytes(&want, &w.proof) {
        let m = "the listener did not prove that it knows this cluster's key; check the key and the address";
        return Err(Error::new(Code::Unauthenticated, m));
    }
    if w.version < us.versions.0 || w.version > us.versions.1 {
        return Err(Error::new(
            Code::Protocol,
            format!("the listener picked wire version {}", w.version),
        ));
    }
    if us.identity.servers.is_some() && !w.signed {
        return Err(no_server("it sent no signature"));
    }
    same_cluster(w.cluster, us.cluster)
}

/// The listener's side.
pub async fn answer<S: AsyncRead + AsyncWrite + Unpin>(s: &mut S, us: &Party) -> Result<Agreed> {
    Ok(answer_if(s, us, |_| Ok(())).await?.0)
}

/// As [`answer`]. A peer that has proved its role is still refused if `admit` refuses it.
pub async fn answer_if<S: AsyncRead + AsyncWrite + Unpin, P>(
    s: &mut S,
    us: &Party,
    admit: impl FnOnce(Role) -> Result<P>,
) -> Result<(Agreed, P)> {
    let mut hello_bytes = [0; HELLO_LEN];
    s.read_exact(&mut hello_bytes).await.map_err(broken)?;
    let hello = Hello::decode(&hello_bytes)?;
    let (version, key) = match judge(us, &hello) {
        Ok(ok) => ok,
        Err(e) => {
            refuse(s, &e).await;
            return Err(e);
        }
    };
    let signer = us.identity.signing.as_ref().filter(|_| hello.signed);
    let (signed, cluster) = (signer.is_some(), us.cluster);
    let mut welcome =
        Welcome { version, status: 0, text: 0, signed, cluster, nonce: us.nonce, proof: [0; 32] };
    welcome.proof = hmac_sha256(key, &[LISTENER, &hello_bytes, &welcome.encode()[..64]]);
    let bytes = welcome.encode();
    s.write_all(&bytes).await.map_err(broken)?;

    read_ending(s).await?;
    let mut proof = [0; PROOF_LEN - 8];
    s.read_exact(&mut proof).await.map_err(broken)?;
    let judged = if same_bytes(&hmac_sha256(key, &[DIALER, &hello_bytes, &bytes]), &proof) {
        admit(hello.role)
    } else {
        let m = "the dialer did not prove that it knows this cluster's key; check its key";
        Err(Error::new(Code::Unauthenticated, m))
    };
    // Only here, after the hello was accepted: signing is work, which strangers could ask for
    // without end.
    let signature = match &judged {
        Ok(_) => {
            signer.map(|k| k.sign(&[SIGNATURE, &hello_bytes, &bytes, &proof].concat()).to_bytes())
        }
        Err(_) => None,
    };
    let signed = signature.as_ref().map_or(&[][..], |s| &s[..]);
    s.write_all(&ending(&judged.as_ref().map(|_| signed).map_err(Clone::clone)))
        .await
        .map_err(broken)?;
    judged.map(|place| (Agreed { version, role: hello.role }, place))
}

/// Sends a welcome that refuses. The connection is closed in any case, so failures to send do not
/// matter.
pub async fn refuse<S: AsyncWrite + Unpin>(s: &mut S, e: &Error) {
    let (n, text) = text_of(e);
    let (status, nothing) = (status(e.code), [0; 32]);
    let w = Welcome {
        version: 0,
        status,
        text: n,
        signed: false,
        cluster: None,
        nonce: nothing,
        proof: nothing,
    };
    let _ = s.write_all(&[&w.encode()[..], text].concat()).await;
    let _ = s.shutdown().await;
}

#[cfg(test)]
mod tests {
    use ed25519_dalek::SigningKey;
    use strake_runtime::ClientKey;

    use super::*;

    fn party(identity: Identity, cluster: Option<[u8; 16]>, nonce: u8) -> Party {
        Party::new(identity, cluster, [nonce; 32])
    }

    async fn meet(dialer: Party, listener: Party) -> (Result<Agreed>, Result<Agreed>) {
        let (mut a, mut b) = tokio::io::duplex(4096);
        tokio::join!(dial(&mut a, &dialer), answer(&mut b, &listener))
    }

    fn server(key: u8) -> Identity {
        Identity::server(&[key; 32])
    }

    #[tokio::test]
    async fn both_roles_agree() {
        let client = Identity::client(server(1).client_key);
        for (id, role) in [(server(1), Role::Server), (client, Role::Client)] {
            for cluster in [None, Some([3; 16])] {
                let (a, b) =
                    meet(party(id.clone(), cluster, 1), party(server(1), Some([3; 16]), 2)).await;
                assert_eq!(a.unwrap(), Agreed { version: WIRE_VERSION, role });
                assert_eq!(b.unwrap(), Agreed { version: WIRE_VERSION, role });
            }
        }
    }

    #[tokio::test]
    async fn wrong_keys_clusters_and_versions_are_refused_in_words_at_both_ends() {
        let ok = || party(server(1), Some([3; 16]), 2);
        let (a, b) = meet(party(server(9), None, 1), ok()).await;
        assert_eq!(
            (a.unwrap_err().code, b.unwrap_err().code),
            (Code::Unauthenticated, Code::Unauthenticated)
        );

        let (a, b) = meet(party(server(1), Some([4; 16]), 1), ok()).await;
        let (a, b) = (a.unwrap_err(), b.unwrap_err());
        assert_eq!((a.code, b.code), (Code::Unauthenticated, Code::Unauthenticated));
        assert!(a.message.contains("0404") && b.message.contains("0303"), "{a} / {b}");

        let (a, b) = meet(Party { versions: (7, 9), ..ok() }, ok()).await;
        let (a, b) = (a.unwrap_err(), b.unwrap_err());
        assert_eq!((a.code, b.code), (Code::Protocol, Code::Protocol));
        assert!(a.message.contains("7 to 9") && b.message.contains("upgrade"), "{a} / {b}");

        let (a, b) = meet(ok(), party(Identity::client([1; 32]), None, 1)).await;
        assert!(a.is_err() && b.is_err());
    }

    #[tokio::test]
    async fn a_listener_that_goes_away_in_the_middle_is_away_and_nothing_else() {
        for told in 0..WELCOME_LEN + VERDICT_LEN {
            let (mut a, mut relay) = tokio::io::duplex(4096);
            let (mut onward, mut b) = tokio::io::duplex(4096);
            let relayed = async move {
                let mut hello = [0; HELLO_LEN];
                relay.read_exact(&mut hello).await.unwrap();
                onward.write_all(&hello).await.unwrap();
                let mut answer = [0; WELCOME_LEN + VERDICT_LEN];
                onward.read_exact(&mut answer[..WELCOME_LEN]).await.unwrap();
                relay.write_all(&answer[..told.min(WELCOME_LEN)]).await.unwrap();
                if told > WELCOME_LEN {
                    let mut proof = [0; PROOF_LEN];
                    relay.read_exact(&mut proof).await.unwrap();
                    onward.write_all(&proof).await.unwrap();
                    onward.read_exact(&mut answer[WELCOME_LEN..]).await.unwrap();
                    relay.write_all(&answer[WELCOME_LEN..told]).await.unwrap();
                }
            };
            let (dialer, listener) = (party(server(1), None, 1), party(server(1), None, 2));
            let (dialed, _, ()) =
                tokio::join!(dial(&mut a, &dialer), answer(&mut b, &listener), relayed);
            assert_eq!(dialed.unwrap_err().code, Code::Disconnected, "after {told} bytes");
        }
    }

    /// A client with everything that a client key file holds.
    fn careful(key: u8) -> Identity {
        Identity::client(ClientKey::of(&[key; 32]))
    }

    #[tokio::test]
    async fn a_listener_that_holds_no_more_than_the_client_key_is_no_server() {
        let (a, b) = meet(party(careful(1), None, 1), party(server(1), Some([3; 16]), 2)).await;
        assert!(a.is_ok() && b.is_ok(), "{a:?} {b:?}");
        // A client that acts as a server with the key of all clients: it does not sign, or signs
        // with a key of its own.
        let forger = SigningKey::from_bytes(&[9; 32]);
        for (signing, words) in [(None, "sent no signature"), (Some(forger), "another key")] {
            let liar = Identity { signing, server_key: None, ..server(1) };
            let (a, _) = meet(party(careful(1), None, 1), party(liar.clone(), None, 2)).await;
            let e = a.unwrap_err();
            assert!(e.code == Code::Unauthenticated && e.message.contains(words), "{e}");
            let (a, _) =
                meet(party(Identity::client(server(1).client_key), None, 1), party(liar, None, 2))
                    .await;
            a.expect("a key file without the public half cannot tell");
        }
    }

    #[tokio::test]
    async fn a_signature_is_of_one_handshake() {
        // What a server signed for another client of the same key, passed on.
        for change in [HELLO_LEN - 1, 13] {
            let (mut a, mut relay) = tokio::io::duplex(4096);
            let (mut onward, mut b) = tokio::io::duplex(4096);
            let key = server(1).client_key;
            let pass = async move {
                let (mut hello, mut theirs) = ([0; HELLO_LEN], [0; HELLO_LEN]);
                relay.read_exact(&mut hello).await.unwrap();
                theirs.copy_from_slice(&hello);
                theirs[change] ^= 1;
                onward.write_all(&theirs).await.unwrap();
                let mut welcome = [0; WELCOME_LEN];
                onward.read_exact(&mut welcome).await.unwrap();
                onward
                    .write_all(&ending(&Ok(&hmac_sha256(&key, &[DIALER, &theirs, &welcome]))))
                    .await
                    .unwrap();
                let mut end = [0; VERDICT_LEN + SIGNATURE_LEN];
                onward.read_exact(&mut end).await.unwrap();
                let proof = hmac_sha256(&key, &[LISTENER, &hello, &welcome[..64]]);
                welcome[64..].copy_from_slice(&proof);
                relay.write_all(&welcome).await.unwrap();
                relay.read_exact(&mut [0; PROOF_LEN]).await.unwrap();
                relay.write_all(&end).await.unwrap();
            };
            let (dialer, listener) = (party(careful(1), None, 1), party(server(1), None, 2));
            let (dialed, answered, ()) =
                tokio::join!(dial(&mut a, &dialer), answer(&mut b, &listener), pass);
            answered.unwrap();
            assert!(dialed.unwrap_err().message.contains("another key"));
        }
    }

    #[tokio::test]
    async fn a_client_key_does_not_make_a_server() {
        let liar =
            Identity { role: Role::Server, server_key: Some(server(1).client_key), ..server(1) };
        let (a, b) = meet(party(liar, None, 1), party(server(1), None, 2)).await;
        assert!(a.is_err() && b.is_err());
    }

    #[tokio::test]
    async fn the_highest_common_version_wins() {
        let id = || party(server(1), None, 1);
        let (a, b) =
            meet(Party { versions: (1, 5), ..id() }, Party { versions: (2, 3), ..id() }).await;
        assert_eq!((a.unwrap().version, b.unwrap().version), (3, 3));
    }

    #[tokio::test]
    async fn any_flipped_bit_of_the_dialer_is_refused() {
        // What an honest dialer sends, recorded, then replayed with one bit changed against the
        // same nonce.
        for byte in (0..HELLO_LEN).filter(|b| !(8..12).contains(b)) {
            let (mut a, mut relay) = tokio::io::duplex(4096);
            let (mut onward, mut b) = tokio::io::duplex(4096);
            let pass = async {
                let mut hello = [0; HELLO_LEN];
                relay.read_exact(&mut hello).await.unwrap();
                hello[byte] ^= 1;
                onward.write_all(&hello).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut relay, &mut onward).await;
            };
            let (dialer, listener) =
                (party(server(1), Some([3; 16]), 1), party(server(1), Some([3; 16]), 2));
            let both = async {
                let answered = async {
                    let r = answer(&mut b, &listener).await;
                    drop(b);
                    r
                };
                let dialed = async {
                    let r = dial(&mut a, &dialer).await;
                    drop(a);
                    r
                };
                tokio::join!(dialed, answered)
            };
            let ((x, y), ()) = tokio::join!(both, pass);
            assert!(x.is_err() && y.is_err(), "byte {byte}: {x:?} {y:?}");
        }
    }

    #[test]
    fn bytes_are_as_documented() {
        let (cluster, nonce) = (Some([0xcc; 16]), [0xaa; 32]);
        let hello = Hello { versions: (1, 2), role: Role::Server, signed: false, cluster, nonce };
        let text = hex::encode(hello.encode());
        let want =
            ["535452414b4548530100020002000100", &"cc".repeat(16), &"aa".repeat(32)].concat();
        assert_eq!(text, want);
        assert_eq!(Hello::decode(&hello.encode()).unwrap(), hello);
        let asks = Hello { signed: true, ..hello };
        assert_eq!((asks.encode()[14], Hello::decode(&asks.encode()).unwrap()), (3, asks));
        let w = Welcome {
            version: 1,
            status: 0,
            text: 0,
            signed: false,
            cluster: Some([0xcc; 16]),
            nonce: [0xbb; 32],
            proof: hmac_sha256(&[1; 32], &[LISTENER, &hello.encode()]),
        };
        let text = hex::encode(w.encode());
        let head =
            ["535452414b4548530100000000000100", &"cc".repeat(16), &"bb".repeat(32)].concat();
        assert_eq!(&text[..128], head);
        assert_eq!(Welcome::decode(&w.encode()).unwrap(), w);
        assert_eq!(
            ending(&Err(Error::new(Code::Unauthenticated, "no"))),
            b"\xf6\x03\x02\0\0\0\0\0no"
        );
        assert_eq!(ending(&Ok(&[7; 32])).len(), PROOF_LEN);
    }

    /// A whole handshake against bytes computed by an independent implementation (Python's hmac).
    #[tokio::test]
    async fn golden_exchange() {
        let (mut us, mut wire) = tokio::io::duplex(4096);
        let dialer = party(Identity::client(server(1).client_key), None, 0x11);
        let wire = async {
            let mut hello = [0; HELLO_LEN];
            wire.read_exact(&mut hello).await.unwrap();
            assert_eq!(
                hex::encode(hello),
                ["535452414b4548530100010001000000", &"00".repeat(16), &"11".repeat(32)].concat()
            );
            let (mut a, mut b) = tokio::io::duplex(4096);
            a.write_all(&hello).await.unwrap();
            let relay = async {
                let mut welcome = [0; WELCOME_LEN];
                a.read_exact(&mut welcome).await.unwrap();
                let head = ["535452414b4548530100000000000100", &"cc".repeat(16), &"22".repeat(32)]
                    .concat();
                assert_eq!(hex::encode(welcome), head + LISTENER_PROOF);
                wire.write_all(&welcome).await.unwrap();
                let mut proof = [0; PROOF_LEN];
                wire.read_exact(&mut proof).await.unwrap();
                assert_eq!(hex::encode(proof), "0000000000000000".to_string() + DIALER_PROOF);
                a.write_all(&proof).await.unwrap();
                let mut verdict = [0; VERDICT_LEN];
                a.read_exact(&mut verdict).await.unwrap();
                assert_eq!(verdict, [0; VERDICT_LEN]);
                wire.write_all(&verdict).await.unwrap();
            };
            let listener = party(server(1), Some([0xcc; 16]), 0x22);
            let (answered, ()) = tokio::join!(answer(&mut b, &listener), relay);
            answered.unwrap();
        };
        let (dialed, ()) = tokio::join!(dial(&mut us, &dialer), wire);
        dialed.unwrap();
    }

    const LISTENER_PROOF: &str = "3c824a183c8063b4f01e250b55e01cb9a48e41a29b90285beb7bc43047b844db";
    const DIALER_PROOF: &str = "558be15723e622234800f960566518ab94f2ee2a6a03db2eefe53521046bc169";
}
