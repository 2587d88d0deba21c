//! Measurements of StrakeFS beside the limits of the machine it runs on: [`cluster`] is
//! `strake bench`, [`gpu`] is `strake gds bench`. Programs that measure one part alone are in
//! `examples`.

#![warn(missing_docs)]

pub mod cluster;
pub mod gpu;
