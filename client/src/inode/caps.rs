//! The capabilities to read and write one file.

use parking_lot::Mutex;
use strake_proto::{
    Code, Error, Result, Rights, SessionId,
    cap::{self, CAP_LEN},
    pb,
};
use tokio::sync::{Mutex as AsyncMutex, MutexGuard};

/// A capability, and what is needed to get the next one.
#[derive(Clone)]
pub(crate) struct Cap {
    pub bytes: [u8; CAP_LEN],
    pub session: SessionId,
    pub expiry_ms: u64,
    /// The opener, and the flags of the open.
    pub creds: pb::Creds,
    pub flags: u32,
}

#[derive(Default)]
struct Newest {
    read: Option<Cap>,
    write: Option<Cap>,
}

/// The newest capability of each kind.
#[derive(Default)]
pub(crate) struct Caps {
    newest: Mutex<Newest>,
    renewing: AsyncMutex<()>,
}

impl Caps {
    /// Keeps the capability that came with the answer to an open.
    pub fn take(
        &self,
        bytes: &[u8],
        session: SessionId,
        flags: u32,
        creds: &pb::Creds,
    ) -> Result<()> {
        let m = "the metadata server gave no capability for an open file";
        let bytes: [u8; CAP_LEN] = bytes.try_into().map_err(|_| Error::new(Code::Protocol, m))?;
        let seen = cap::peek(&bytes);
        let c = Cap { bytes, session, expiry_ms: seen.expiry_ms, creds: creds.clone(), flags };
        let mut newest = self.newest.lock();
        if seen.rights.has(Rights::READ) {
            newest.read = Some(c.clone());
        }
        if seen.rights.has(Rights::WRITE) {
            newest.write = Some(c);
        }
        Ok(())
    }

    /// The newest capability to write, or to read.
    pub fn get(&self, write: bool) -> Option<Cap> {
        let newest = self.newest.lock();
        if write { newest.write.clone() } else { newest.read.clone() }
    }

    /// Whether the file was opened for reading.
    pub fn may_read(&self) -> bool {
        self.newest.lock().read.is_some()
    }

    /// Waits for the turn to renew them: one renewal at a time.
    pub async fn renewing(&self) -> MutexGuard<'_, ()> {
        self.renewing.lock().await
    }
}

#[cfg(test)]
mod tests {
    use strake_proto::{
        bound::Bound,
        cap::{CapKey, Capability},
    };

    use super::*;

    fn sealed(rights: Rights, expiry_ms: u64) -> [u8; CAP_LEN] {
        CapKey::from_cluster_key(&[7; 32]).seal(&Capability {
            ino: 5,
            data: 5,
            session: 9,
            session_epoch: 1,
            expiry_ms,
            rights,
            bound: Bound::One { chain: 77, bits: 30 },
            as_of: 0,
        })
    }

    #[test]
    fn each_kind_of_access_has_its_newest() {
        let (caps, me) = (Caps::default(), pb::Creds::default());
        assert!(!caps.may_read() && caps.get(false).is_none() && caps.get(true).is_none());
        caps.take(&sealed(Rights::READ.and(Rights::WRITE), 100), 9, 2, &me).unwrap();
        caps.take(&sealed(Rights::READ, 200), 9, 0, &me).unwrap();
        let seen = |write| caps.get(write).map(|c| (c.expiry_ms, c.flags));
        assert!(caps.may_read());
        assert_eq!((seen(false), seen(true)), (Some((200, 0)), Some((100, 2))));
        assert_eq!(caps.take(b"short", 9, 0, &me).unwrap_err().code, Code::Protocol);
    }
}
