//! Headers of safetensors files, which come from anywhere.

use strake_gds::tensors::read;

use crate::input::Input;

/// The first byte chooses whether the file is as long as its header says, as long as the input, or
/// of any length.
pub fn run(data: &[u8]) {
    let mut i = Input(data);
    let size = match i.u8() % 3 {
        0 => i.0.len() as u64,
        1 => i.u64(),
        _ => i.0.len() as u64 + u64::from(i.u16()),
    };
    // What it accepts it lays out without gaps and within the file: asserted there.
    let _ = read(i.0, size);
}
