//! Extended attributes, and the virtual ones through which `lfs` talks to a mount with its caller's
//! permissions.
//!
//! Virtual names are not listed:
//! - `strake.layout`: a file's encoded [`pb::Layout`], or a directory's own default as a
//!   [`pb::LayoutSpec`] (`ENODATA` if it has none).
//! - `strake.effective`: the [`pb::Layout`] that a file created in the directory would get.
//! - `strake.spec`, only to be set: an encoded [`pb::LayoutSpec`] as a directory's default or an
//!   unwritten file's layout. Removing it deletes a directory's default.
//! - `strake.fid`: the FID in text.
//! - `strake.name`: the file system's name.
//! - `strake.statfs`: an encoded [`pb::StatfsReply`].
//! - `strake.seal`: how a file is sealed, an encoded [`pb::SealInfo`] (`ENODATA` if it is not). To
//!   be set: an encoded [`pb::Seal`], one step of sealing the file. The same as
//!   `system.strake.seal`, for which the kernel leaves the permission check to the metadata
//!   servers: an owner without write permission may seal a file.
//! - `strake.seal.N`: the digests of page N of the file's manifest.
//! - `strake.transports`: how the storage servers are reached, and the transports by which bytes of the
//!   file were moved, an encoded [`pb::Transports`].
//! - `strake.map.N`: part N of the encoded cluster map, see [`map_part`].
//! - `strake.path.FID`: the path of that FID from the root of the mount. For root only, since it
//!   ignores search permissions.

use std::sync::Arc;

use bytes::Bytes;
use prost::Message as _;
use strake_proto::{Code, Error, Fid, Ino, Result, pb};

use super::{
    base::Base,
    gone::Gone,
    known::Known,
    subtree::path_within,
    types::{Caller, stale},
};

const VIRTUAL: &[u8] = b"strake.";
/// Most bytes of the map in one part. Linux accepts at most 64 KiB as the value of an xattr.
pub const MAP_PART: usize = 60 << 10;
/// Bytes of [`map_part`]'s head.
pub const MAP_HEAD: usize = 16;

/// The part of a virtual name after the prefix.
fn of_mount(name: &[u8]) -> Option<&[u8]> {
    if name == b"system.strake.seal" { Some(b"seal") } else { name.strip_prefix(VIRTUAL) }
}

fn no_data(what: impl Into<String>) -> Error {
    Error::new(Code::NoData, what)
}

/// Requests for extended attributes.
pub struct Xattrs {
    base: Arc<Base>,
    gone: Arc<Gone>,
    known: Arc<Known>,
}

impl Xattrs {
    pub(super) fn new(base: Arc<Base>, gone: Arc<Gone>, known: Arc<Known>) -> Xattrs {
        Xattrs { base, gone, known }
    }

    /// getxattr(2): the value.
    pub async fn get(&self, caller: Caller<'_>, ino: Ino, name: &[u8]) -> Result<Bytes> {
        let ino = self.base.inner(ino);
        match of_mount(name) {
            Some(rest) => self.get_virtual(caller, ino, rest).await,
            None => match self.base.client.xattrs().get(&caller.creds(), ino, name).await {
                Ok(value) => Ok(Bytes::from(value)),
                Err(e) => Err(self
                    .gone
                    .or_held(ino, e)
                    .err()
                    .unwrap_or_else(|| no_data("the directory was removed"))),
            },
        }
    }

    /// setxattr(2). `flags`: `XATTR_CREATE` 1, `XATTR_REPLACE` 2.
    pub async fn set(
        &self,
        caller: Caller<'_>,
        ino: Ino,
        name: &[u8],
        value: &[u8],
        flags: u32,
    ) -> Result<()> {
        let ino = self.base.inner(ino);
        let creds = caller.creds();
        match of_mount(name) {
            Some(b"spec") => {
                let spec = pb::LayoutSpec::decode(value).map_err(|e| {
                    Error::new(Code::Inval, format!("strake.spec is not a layout spec: {e}"))
                })?;
                self.base.client.layouts().set(caller.with(&creds), ino, Some(spec)).await
            }
            Some(b"seal") => {
                let step = pb::Seal::decode(value).map_err(|e| {
                    Error::new(Code::Inval, format!("strake.seal is not a step of sealing: {e}"))
                })?;
                self.base
                    .client
                    .seals()
                    .step(caller.with(&creds), pb::Seal { ino, ..step })
                    .await
                    .map(drop)
            }
            Some(_) => Err(Error::new(Code::OpNotSupp, "this strake.* attribute cannot be set")),
            None => {
                let caller = caller.with(&creds);
                self.base.client.xattrs().set(caller, ino, name, value, flags).await.map_err(stale)
            }
        }
    }

    /// removexattr(2).
    pub async fn remove(&self, caller: Caller<'_>, ino: Ino, name: &[u8]) -> Result<()> {
        let ino = self.base.inner(ino);
        let creds = caller.creds();
        match of_mount(name) {
            Some(b"spec") => self.base.client.layouts().set(caller.with(&creds), ino, None).await,
            Some(_) => {
                Err(Error::new(Code::OpNotSupp, "this strake.* attribute cannot be removed"))
            }
            None => self
                .base
                .client
                .xattrs()
                .remove(caller.with(&creds), ino, name)
                .await
                .map_err(stale),
        }
    }

    /// listxattr(2): the names, each followed by a NUL.
    pub async fn list(&self, caller: Caller<'_>, ino: Ino) -> Result<Vec<u8>> {
        let ino = self.base.inner(ino);
        let names = match self.base.client.xattrs().list(&caller.creds(), ino).await {
            Ok(names) => names,
            Err(e) => self.gone.or_held(ino, e).map(|_| Vec::new())?,
        };
        let mut all = Vec::new();
        for n in names.iter().filter(|n| !n.starts_with(VIRTUAL)) {
            all.extend_from_slice(n);
            all.push(0);
        }
        Ok(all)
    }

    async fn get_virtual(&self, caller: Caller<'_>, ino: Ino, name: &[u8]) -> Result<Bytes> {
        let name = std::str::from_utf8(name).map_err(|_| no_data("no such strake.* attribute"))?;
        match name {
            "fid" => return Ok(Fid::from_ino(ino).to_string().into_bytes().into()),
            "name" => {
                return Ok(self
                    .base
                    .client
                    .servers()
                    .map()
                    .map
                    .fs_name
                    .clone()
                    .into_bytes()
                    .into());
            }
            // Programs of 0.1.0 ask for `roads`.
            "transports" | "roads" => {
                return Ok(self.base.client.servers().file_transports(ino).encode_to_vec().into());
            }
            "statfs" => return Ok(self.known.ask_space(&self.base).await?.encode_to_vec().into()),
            "layout" => {
                let found = self.base.client.layouts().get(&caller.creds(), ino).await?;
                return match (found.layout, found.spec) {
                    (Some(layout), _) => Ok(layout.encode_to_vec().into()),
                    (None, Some(spec)) => Ok(spec.encode_to_vec().into()),
                    (None, None) => Err(no_data("it has no layout of its own")),
                };
            }
            "effective" => {
                let found = self.base.client.layouts().get(&caller.creds(), ino).await?;
                let layout =
                    found.effective.or(found.layout).ok_or_else(|| no_data("no layout"))?;
                return Ok(layout.encode_to_vec().into());
            }
            "seal" => {
                return Ok(self
                    .base
                    .client
                    .seals()
                    .get(&caller.creds(), ino, None)
                    .await?
                    .0
                    .encode_to_vec()
                    .into());
            }
            _ => {}
        }
        if let Some(page) = name.strip_prefix("seal.") {
            let page = page.parse().map_err(|_| no_data("strake.seal.N takes a number"))?;
            return Ok(self.base.client.seals().get(&caller.creds(), ino, Some(page)).await?.1);
        }
        if let Some(number) = name.strip_prefix("map.") {
            let number = number.parse().map_err(|_| no_data("strake.map.N takes a number"))?;
            let map = self.base.client.servers().map();
            return map_part(map.version(), &map.map.encode_to_vec(), number);
        }
        if let Some(fid) = name.strip_prefix("path.") {
            if caller.uid != 0 {
                return Err(Error::new(Code::Perm, "only root may ask for the path of a FID"));
            }
            let ino = fid.parse::<Fid>()?.to_ino()?;
            let path = path_within(&self.base.client, self.base.root, ino).await;
            return path.map(Bytes::from).map_err(|e| match e.code {
                Code::Stale => Error::new(Code::NoEnt, e.message),
                _ => e,
            });
        }
        Err(no_data("no such strake.* attribute"))
    }
}

/// Part `number` of the encoded map: version of the map (u64), length of the whole encoding (u64),
/// both little-endian, then the bytes from `number` × [`MAP_PART`] on. `ENODATA` beyond the end.
/// Parts of different versions do not fit together: then the reader starts again.
pub fn map_part(version: u64, map: &[u8], number: usize) -> Result<Bytes> {
    let start = number.saturating_mul(MAP_PART);
    if start > 0 && start >= map.len() {
        return Err(no_data("beyond the end of the map"));
    }
    let part = &map[start..map.len().min(start + MAP_PART)];
    let mut out = Vec::with_capacity(MAP_HEAD + part.len());
    out.extend_from_slice(&version.to_le_bytes());
    out.extend_from_slice(&(map.len() as u64).to_le_bytes());
    out.extend_from_slice(part);
    Ok(out.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn map_parts_tile_the_map() {
        for len in [0, 1, MAP_PART - 1, MAP_PART, MAP_PART + 1, 3 * MAP_PART + 7] {
            let map: Vec<u8> = (0..len).map(|i| (i * 7 % 256) as u8).collect();
            let mut whole = Vec::new();
            for n in 0.. {
                match map_part(9, &map, n) {
                    Ok(part) => {
                        assert!(part.len() <= 64 << 10);
                        assert_eq!(part[..8], 9u64.to_le_bytes());
                        assert_eq!(part[8..16], (len as u64).to_le_bytes());
                        whole.extend_from_slice(&part[MAP_HEAD..]);
                    }
                    Err(e) => {
                        assert_eq!(e.code, Code::NoData);
                        break;
                    }
                }
            }
            assert_eq!(whole, map);
        }
        assert!(map_part(1, &[1], usize::MAX).is_err());
    }
}
