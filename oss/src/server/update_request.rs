//! An update as it arrived, and what it is to the engine.

use strake_fabric::Buf;
use strake_proto::{
    Code, Error, Result,
    data::{DataRequest, FLAG_TOMBSTONE, Kind},
};

use super::revocations::InWork;
use crate::engine::Update;

/// An update, kept until it is answered.
pub(super) struct UpdateRequest {
    pub request: DataRequest,
    pub payload: Vec<Buf>,
    /// Ties log lines of several processes together; 0: none.
    pub trace: u64,
    /// Set for an update of a session.
    pub _in_work: Option<InWork>,
}

impl UpdateRequest {
    /// The update in the engine's terms.
    pub(super) fn update(&self) -> Result<Update> {
        let (r, data) = (&self.request, || self.payload.clone());
        Ok(match r.kind {
            Kind::Write => Update::Write { offset: r.offset, data: data(), sums: r.sums.clone() },
            Kind::Punch => Update::Punch { offset: r.offset, len: r.len },
            Kind::Truncate => Update::Truncate { len: r.offset },
            Kind::Remove => Update::Remove,
            Kind::Replace => {
                let (sums, tombstone, damaged) =
                    (r.sums.clone(), r.flags & FLAG_TOMBSTONE != 0, r.damaged.clone());
                Update::Replace { data: data(), sums, tombstone, damaged }
            }
            Kind::None => return Err(Error::new(Code::Inval, "an update without any change")),
        })
    }
}
