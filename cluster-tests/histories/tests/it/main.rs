//! The integration tests of the crate, as one program: most of the time of a test program goes into
//! linking it.

mod brute;
mod known;
mod linux;
mod real;
