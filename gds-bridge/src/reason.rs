//! Why a tier cannot be used.

use std::fmt;

use strake_fabric::Transport;

use crate::fault::Fault;

/// Why a tier cannot be used. As text, one sentence that names what is missing and, if possible,
/// what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unavailable {
    /// A library that it needs cannot be opened.
    NoLibrary {
        /// Its file name.
        library: String,
        /// What the loader said.
        why: String,
    },
    /// A library lacks a function.
    OldLibrary {
        /// Its file name.
        library: String,
        /// The function.
        symbol: String,
    },
    /// The driver has fewer devices than the number requires.
    NoDevice {
        /// Number of the device that was asked for.
        wanted: u32,
        /// How many there are.
        found: u32,
    },
    /// The device does not export its memory.
    NoDmaBuf {
        /// Its name.
        device: String,
    },
    /// The device cannot be made to see what others wrote into its memory.
    NoFlush {
        /// Its name.
        device: String,
    },
    /// No host memory could be registered with the device.
    NotPinned(Fault),
    /// The client reaches no storage server by RDMA.
    NoRdma {
        /// What it lacks.
        why: String,
    },
    /// The test file on the cluster could not be made, written or read.
    NoScratch {
        /// What the file system said.
        why: String,
    },
    /// The device computes no checksums, and storage servers accept no bytes without them.
    NoSums {
        /// Why it computes none.
        why: String,
    },
    /// Bytes came by another transport than the tier stands for.
    OtherTransport(Transport),
    /// Its bytes would be verified at the storage server only, and the caller did not agree to
    /// that.
    NoConsent,
    /// No folder with copies of this node was named.
    NoFolder,
    /// The folder cannot hold copies that cuFile could read.
    BadFolder {
        /// Its path.
        dir: String,
        /// What is wrong with it.
        why: String,
    },
    /// cuFile's driver would never finish opening.
    NoModules {
        /// What cannot be read.
        why: String,
    },
    /// The process has StrakeFS's own library in place of cuFile, and NVIDIA's library would call
    /// into it.
    OwnCuFile,
    /// NVIDIA's library was not found.
    NoCuFile {
        /// What the loader said.
        why: String,
    },
    /// NVIDIA's library lacks a function.
    OldCuFile {
        /// Its file name.
        library: String,
        /// The function.
        symbol: String,
    },
    /// NVIDIA's library cannot be used.
    CuFile {
        /// What it reported.
        why: String,
    },
    /// The program that opens cuFile first cannot be started.
    NoProbe {
        /// Its path or name.
        program: String,
        /// What the system said.
        why: String,
    },
    /// The file may change: only sealed ones have copies.
    NotSealed {
        /// Its inode.
        ino: u64,
    },
    /// The file has no copy on this node that could be read.
    NoCopy {
        /// Its inode.
        ino: u64,
        /// Why.
        why: String,
    },
    /// The tier cannot save.
    LoadsOnly,
    /// No self-test was run.
    NotTested,
    /// The self-test could not be completed.
    TestStopped(Fault),
    /// The self-test read back bytes other than those it had written.
    TestFailed {
        /// First byte that differed, counted from the beginning of the part.
        at: u64,
    },
    /// It failed in a call.
    Lost(Fault),
    /// It failed in a call for lack of something that its self-test does not check, and is not used
    /// for a while.
    Resting(Fault),
    /// The device can no longer be accessed.
    Device(Fault),
    /// The probing program did not answer in time.
    Hung {
        /// How long the caller waited.
        seconds: u64,
    },
    /// The probing program ended without an answer.
    Died {
        /// How it ended.
        how: String,
    },
}

impl Unavailable {
    /// A short word for scripts.
    pub const fn kind(&self) -> &'static str {
        match self {
            Unavailable::NoLibrary { .. } => "no-library",
            Unavailable::OldLibrary { .. } => "old-library",
            Unavailable::NoDevice { .. } => "no-device",
            Unavailable::NoDmaBuf { .. } => "no-dma-buf",
            Unavailable::NoFlush { .. } => "no-flush",
            Unavailable::NotPinned(_) => "not-pinned",
            Unavailable::NoRdma { .. } => "no-rdma",
            Unavailable::NoScratch { .. } => "no-scratch",
            Unavailable::NoSums { .. } => "no-sums",
            Unavailable::OtherTransport(_) => "came-by",
            Unavailable::NoConsent => "no-consent",
            Unavailable::NoFolder => "no-folder",
            Unavailable::BadFolder { .. } => "bad-folder",
            Unavailable::NoModules { .. } => "no-modules",
            Unavailable::OwnCuFile => "own-cufile",
            Unavailable::NoCuFile { .. } => "no-cufile",
            Unavailable::OldCuFile { .. } => "old-cufile",
            Unavailable::CuFile { .. } => "cufile",
            Unavailable::NoProbe { .. } => "no-probe",
            Unavailable::NotSealed { .. } => "not-sealed",
            Unavailable::NoCopy { .. } => "no-copy",
            Unavailable::LoadsOnly => "loads-only",
            Unavailable::NotTested => "not-tested",
            Unavailable::TestStopped(_) => "test-stopped",
            Unavailable::TestFailed { .. } => "test-failed",
            Unavailable::Lost(_) => "lost",
            Unavailable::Resting(_) => "resting",
            Unavailable::Device(_) => "device",
            Unavailable::Hung { .. } => "hung",
            Unavailable::Died { .. } => "died",
        }
    }
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unavailable::NoLibrary { library, why } => {
                write!(
                    f,
                    "{library} cannot be opened ({why}): install the NVIDIA driver on this machine"
                )
            }
            Unavailable::OldLibrary { library, symbol } => {
                write!(f, "{library} has no function {symbol}: install a newer NVIDIA driver")
            }
            Unavailable::NoDevice { wanted, found: 0 } => {
                write!(
                    f,
                    "the driver finds no GPU, so there is no device {wanted}; check nvidia-smi \
                     and CUDA_VISIBLE_DEVICES"
                )
            }
            Unavailable::NoDevice { wanted, found } => {
                write!(
                    f,
                    "there is no device {wanted}: the numbers are 0 to {}",
                    found.saturating_sub(1)
                )
            }
            Unavailable::NoDmaBuf { device } => {
                write!(
                    f,
                    "{device} does not export its memory as dma-buf; this needs the open kernel \
                     modules of the driver"
                )
            }
            Unavailable::NoFlush { device } => {
                write!(
                    f,
                    "{device} does not notice by itself when others write to its memory, and \
                     cannot be made to"
                )
            }
            Unavailable::NotPinned(e) => write!(f, "no host memory could be pinned: {e}"),
            Unavailable::NoRdma { why } => {
                write!(f, "no storage server is reached by RDMA: {why}")
            }
            Unavailable::NoScratch { why } => {
                write!(
                    f,
                    "its self-test needs an unnamed file in the root of the file system, and \
                     could not create one: {why}"
                )
            }
            Unavailable::NoSums { why } => {
                write!(
                    f,
                    "storage servers accept no bytes without checksums, and the device \
                           computes none: {why}"
                )
            }
            Unavailable::OtherTransport(transport) => write!(
                f,
                "bytes of a part took another transport than this tier stands for: {transport}"
            ),
            Unavailable::NoConsent => f.write_str(
                "the device does not verify its bytes, and accept_oss_checksum is not set",
            ),
            Unavailable::NoFolder => f.write_str(
                "no folder with copies on this node was given (`local`); `strake gds \
                             stage` makes copies",
            ),
            Unavailable::BadFolder { dir, why } => {
                write!(f, "'{dir}' holds no copies that cuFile could read: {why}")
            }
            Unavailable::NoModules { why } => {
                write!(f, "cuFile would hang on this machine, because it lacks a file ({why})")
            }
            Unavailable::OwnCuFile => f.write_str(
                "libcufile in this process is StrakeFS's own library, and NVIDIA's would call it",
            ),
            Unavailable::NoCuFile { why } => {
                write!(f, "NVIDIA's libcufile is not available: {why}")
            }
            Unavailable::OldCuFile { library, symbol } => {
                write!(f, "{library} has no function {symbol}: cuFile 1.15 or newer is needed")
            }
            Unavailable::CuFile { why } => write!(f, "cuFile cannot be used: {why}"),
            Unavailable::NoProbe { program, why } => {
                write!(
                    f,
                    "cuFile may hang, so `{program}` must open it first, and that cannot be \
                           started: {why}"
                )
            }
            Unavailable::NotSealed { ino } => write!(
                f,
                "inode {ino:#x} is not sealed, and only sealed files have copies: run `lfs seal`, \
                 then `strake gds stage`"
            ),
            Unavailable::NoCopy { ino, why } => {
                write!(f, "inode {ino:#x} has no copy on this node: {why}")
            }
            Unavailable::LoadsOnly => {
                f.write_str("copies are read only: nothing can be saved to them")
            }
            Unavailable::NotTested => f.write_str("not tested yet: run `strake gds probe`"),
            Unavailable::TestStopped(e) => write!(f, "the self-test could not be run: {e}"),
            Unavailable::TestFailed { at } => {
                write!(
                    f,
                    "the self-test read back other bytes than it wrote, from byte {at} on: do not \
                     trust this device"
                )
            }
            Unavailable::Lost(e) => {
                write!(f, "it failed in a call and has passed no self-test since: {e}")
            }
            Unavailable::Resting(e) => {
                write!(
                    f,
                    "it failed in a call; calls that may use another tier avoid it for a \
                           while: {e}"
                )
            }
            Unavailable::Device(e) => write!(f, "the device cannot be used: {e}"),
            Unavailable::Hung { seconds } => {
                write!(
                    f,
                    "no answer in {seconds} s: the driver hangs, and would hang every \
                           program that uses it"
                )
            }
            Unavailable::Died { how } => {
                write!(f, "the probing program {how} before it had an answer")
            }
        }
    }
}

impl std::error::Error for Unavailable {}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// One of each.
    pub fn all() -> Vec<Unavailable> {
        let fault = || Fault::Pin { bytes: 4096, why: "the limit is reached".into() };
        let all = vec![
            Unavailable::NoLibrary { library: "libcuda.so.1".into(), why: "no such file".into() },
            Unavailable::OldLibrary { library: "libcuda.so.1".into(), symbol: "cuInit".into() },
            Unavailable::NoDevice { wanted: 3, found: 2 },
            Unavailable::NoDmaBuf { device: "A GPU".into() },
            Unavailable::NoFlush { device: "A GPU".into() },
            Unavailable::NotPinned(fault()),
            Unavailable::NoRdma { why: "there is no device".into() },
            Unavailable::NoScratch { why: "permission denied".into() },
            Unavailable::NoSums { why: "it has no kernel".into() },
            Unavailable::OtherTransport(Transport::Tcp),
            Unavailable::NoConsent,
            Unavailable::NoFolder,
            Unavailable::BadFolder {
                dir: "/copies".into(),
                why: "it may be written by others".into(),
            },
            Unavailable::NoModules { why: "no such file".into() },
            Unavailable::OwnCuFile,
            Unavailable::NoCuFile { why: "no such file".into() },
            Unavailable::OldCuFile {
                library: "libcufile.so.0".into(),
                symbol: "cuFileGetStatsL3".into(),
            },
            Unavailable::CuFile { why: "cuFileDriverOpen failed with 5007".into() },
            Unavailable::NoProbe { program: "strake".into(), why: "no such file".into() },
            Unavailable::NotSealed { ino: 77 },
            Unavailable::NoCopy { ino: 77, why: "it was removed".into() },
            Unavailable::LoadsOnly,
            Unavailable::NotTested,
            Unavailable::TestStopped(fault()),
            Unavailable::TestFailed { at: 7 },
            Unavailable::Lost(fault()),
            Unavailable::Resting(fault()),
            Unavailable::Device(Fault::ContextGone),
            Unavailable::Hung { seconds: 20 },
            Unavailable::Died { how: "was killed by signal 11".into() },
        ];
        for u in &all {
            // Add new cases here, too.
            match u {
                Unavailable::NoLibrary { .. }
                | Unavailable::OldLibrary { .. }
                | Unavailable::NoDevice { .. }
                | Unavailable::NoDmaBuf { .. }
                | Unavailable::NoFlush { .. }
                | Unavailable::NotPinned(_)
                | Unavailable::NoRdma { .. }
                | Unavailable::NoScratch { .. }
                | Unavailable::NoSums { .. }
                | Unavailable::OtherTransport(_)
                | Unavailable::NoConsent
                | Unavailable::NoFolder
                | Unavailable::BadFolder { .. }
                | Unavailable::NoModules { .. }
                | Unavailable::OwnCuFile
                | Unavailable::NoCuFile { .. }
                | Unavailable::OldCuFile { .. }
                | Unavailable::CuFile { .. }
                | Unavailable::NoProbe { .. }
                | Unavailable::NotSealed { .. }
                | Unavailable::NoCopy { .. }
                | Unavailable::LoadsOnly
                | Unavailable::NotTested
                | Unavailable::TestStopped(_)
                | Unavailable::TestFailed { .. }
                | Unavailable::Lost(_)
                | Unavailable::Resting(_)
                | Unavailable::Device(_)
                | Unavailable::Hung { .. }
                | Unavailable::Died { .. } => {}
            }
        }
        all
    }

    #[test]
    fn each_reason_is_one_sentence_of_its_own() {
        let all = all();
        for (i, u) in all.iter().enumerate() {
            let text = u.to_string();
            assert!(
                text.len() > 20
                    && !text.contains('\n')
                    && !text.contains(". ")
                    && !text.ends_with('.'),
                "{text}"
            );
            assert!(
                all[..i].iter().all(|o| o.kind() != u.kind() && o.to_string() != text),
                "{text}"
            );
        }
        let none = Unavailable::NoDevice { wanted: 0, found: 0 }.to_string();
        assert!(none.contains("no GPU") && none.contains("CUDA_VISIBLE_DEVICES"), "{none}");
    }
}
