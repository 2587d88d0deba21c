//! Safetensors files of a session: loading into the device's memory and saving from it.

use std::{collections::BTreeMap, sync::Arc};

use strake_client::File;
use strake_proto::{Code, Error, Result};

use super::{Content, Session};
use crate::{
    Failed, Policy, Report, Transfer,
    report::Direction,
    tensors::{Header, New, PREFIX, build, header_len},
};

/// A safetensors file that is open for reading.
pub struct TensorFile {
    /// The file.
    pub file: Arc<File>,
    /// Its header, checked against its size.
    pub header: Header,
    path: String,
}

impl TensorFile {
    /// Transfers of all its tensors to one block of memory, laid out as [`Header::layout`] says, in
    /// as few ranges as possible.
    pub fn to_block(&self, block: u64) -> Vec<Transfer> {
        let (places, _) = self.header.layout();
        let mut all: Vec<Transfer> = Vec::new();
        for (t, place) in self.header.tensors.iter().zip(places).filter(|(t, _)| t.len > 0) {
            let gpu = block + place;
            match all.last_mut().filter(|l| l.offset + l.len == t.offset && l.gpu + l.len == gpu) {
                Some(last) => last.len += t.len,
                None => all.push(Transfer {
                    file: self.file.clone(),
                    offset: t.offset,
                    gpu,
                    len: t.len,
                }),
            }
        }
        all
    }

    /// Transfers of tensors to existing memory. `to` returns address and bytes for a name, or
    /// `None` if the tensor is not wanted. `EINVAL` for one of another size.
    pub fn to_places(&self, to: impl Fn(&str) -> Option<(u64, u64)>) -> Result<Vec<Transfer>> {
        let mut all = Vec::new();
        for t in &self.header.tensors {
            let Some((gpu, len)) = to(&t.name) else { continue };
            if len != t.len {
                let m = format!(
                    "{}: tensor '{}' has {} bytes, but the memory for it has {len}",
                    self.path, t.name, t.len
                );
                return Err(Error::new(Code::Inval, m));
            }
            all.push(Transfer { file: self.file.clone(), offset: t.offset, gpu, len });
        }
        Ok(all)
    }
}

impl Session {
    /// Opens a safetensors file and reads its header. `EINVAL` if the header does not match the
    /// file.
    pub fn open_tensors(&self, path: &str) -> Result<TensorFile> {
        let file = self.open_file(path, libc::O_RDONLY as u32, 0)?;
        let header = self.header(&file).map_err(|e| e.context(format!("path '{path}'")));
        match header {
            Ok(header) => Ok(TensorFile { file: Arc::new(file), header, path: path.into() }),
            Err(e) => {
                let _ = self.close(file);
                Err(e)
            }
        }
    }

    fn header(&self, file: &File) -> Result<Header> {
        let size = self.size(file)?;
        let n = header_len(&self.read(file, 0, PREFIX)?, size)?;
        Header::parse(&self.read(file, PREFIX as u64, n)?, size)
    }

    /// Writes tensors as a safetensors file that gets the name `path` when it is complete and
    /// durable: see [`Session::replace`].
    pub fn save_tensors(
        &self,
        path: &str,
        mode: u32,
        tensors: &[New],
        notes: &BTreeMap<String, String>,
        policy: Policy,
    ) -> Result<Report, Failed> {
        let refused = |error| {
            let report = Box::new(Report::nothing(Direction::Save, policy, 0, tensors.len()));
            Failed { error, report }
        };
        let (head, ranges) = build(tensors, notes).map_err(refused)?;
        self.replace(path, mode, Content { head: &head, device: &ranges }, policy)
    }
}
