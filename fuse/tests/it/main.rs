//! The integration tests of the crate, as one program: most of the time of a test program goes into
//! linking it.

mod common;
mod directory;
mod ioctl;
mod killed;
mod leases;
mod locks;
mod mappings;
mod mount;
mod names;
mod next_daemon;
mod unmounted;
mod vfs;
