//! In memory.
#[derive(Debug, Default)]
pub struct MemStore {}
