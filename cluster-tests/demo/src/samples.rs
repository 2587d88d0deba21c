//! The samples: real files from the given folder, or files that any machine with Rust has.

use std::{
    fs::{self, File},
    io::Read,
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};

use crate::Result;

pub struct Sample {
    pub path: PathBuf,
    /// The sample's name in its shard: a number and the extension, as WebDataset wants it.
    pub name: String,
    pub len: u64,
    pub sha256: [u8; 32],
}

const MIN_FILES: usize = 2000;
const MIN_BYTES: u64 = 200_000_000;
/// A sample is read into memory, so larger files are left out.
const MAX_FILE: u64 = 64 << 20;

/// Walks all of the given folder, or well-known folders until there are enough files and bytes.
pub fn collect(folder: Option<&Path>) -> Result<Vec<Sample>> {
    let mut samples = Vec::new();
    if let Some(f) = folder {
        walk(f, &mut samples, &|_| false)?;
        return if samples.is_empty() {
            Err(format!("{} has no files to use as samples", f.display()).into())
        } else {
            Ok(samples)
        };
    }
    let enough =
        |s: &[Sample]| s.len() >= MIN_FILES && s.iter().map(|s| s.len).sum::<u64>() >= MIN_BYTES;
    for root in roots(&std::env::var("HOME").unwrap_or_default()) {
        // A missing folder is normal here; only the total counts. Folders with many small files
        // come first, so each walk stops early enough to leave room for larger files.
        let _ = walk(Path::new(&root), &mut samples, &enough);
        if enough(&samples) {
            return Ok(samples);
        }
    }
    Err(format!(
        "this machine has only {} files to use as samples; name a folder: ./demo FOLDER",
        samples.len()
    )
    .into())
}

/// Folders that any machine with Rust has. No folder is inside another, so that a file counts once.
fn roots(home: &str) -> [String; 5] {
    [
        "/usr/share".into(),
        "/usr/lib".into(),
        format!("{home}/.rustup"),
        format!("{home}/.cargo/registry"),
        "/usr/bin".into(),
    ]
}

fn walk(dir: &Path, samples: &mut Vec<Sample>, enough: &dyn Fn(&[Sample]) -> bool) -> Result<()> {
    let mut entries: Vec<_> = fs::read_dir(dir)?.filter_map(std::result::Result::ok).collect();
    entries.sort_by_key(fs::DirEntry::file_name);
    for e in entries {
        if samples.len().is_multiple_of(64) && enough(samples) {
            return Ok(());
        }
        let Ok(kind) = e.file_type() else { continue };
        if kind.is_dir() {
            // A folder that cannot be read is skipped: the samples are whatever is readable.
            let _ = walk(&e.path(), samples, enough);
        } else if kind.is_file()
            && e.metadata().is_ok_and(|m| m.len() > 0 && m.len() <= MAX_FILE)
            && let Ok(s) = sample(e.path(), samples.len())
        {
            samples.push(s);
        }
    }
    Ok(())
}

fn sample(path: PathBuf, number: usize) -> Result<Sample> {
    let mut bytes = Vec::new();
    File::open(&path)?.read_to_end(&mut bytes)?;
    let ext = path
        .extension()
        .and_then(|e| e.to_str())
        .filter(|e| e.len() <= 16 && e.is_ascii())
        .unwrap_or("bin");
    Ok(Sample {
        name: format!("{number:08}.{}", ext.to_ascii_lowercase()),
        len: bytes.len() as u64,
        sha256: Sha256::digest(&bytes).into(),
        path,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_folder_of_samples_lies_in_another() {
        let roots = roots("/home/x");
        for (i, a) in roots.iter().enumerate() {
            for (j, b) in roots.iter().enumerate() {
                assert!(i == j || !Path::new(a).starts_with(b), "{a} is below {b}");
            }
        }
    }
}
