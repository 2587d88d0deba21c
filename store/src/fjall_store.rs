//! On disk.
#[derive(Debug)]
pub struct FjallStore {}
