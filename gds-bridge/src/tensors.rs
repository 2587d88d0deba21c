//! The safetensors format: eight bytes with the length of a JSON header, the header, and the
//! tensors' bytes without gaps. The format's own library decodes the header; this module checks
//! every length in it against the size of the file. Pure.

use std::collections::{BTreeMap, HashSet};

pub use safetensors::tensor::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use strake_proto::{Code, Error, Result};

/// Size of the header's length field.
pub const PREFIX: usize = 8;
/// Maximum length of a header, as in the format's own library.
const LONGEST: u64 = 100_000_000;
/// Alignment of tensors that are placed one by one, as for allocations.
const ALIGN: u64 = 256;

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// Type of its elements.
    pub dtype: Dtype,
    /// Elements in each dimension, the last one varying fastest.
    pub shape: Vec<usize>,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// The header of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// In the order of their bytes.
    pub tensors: Vec<Tensor>,
    /// Notes of the file's author.
    pub notes: BTreeMap<String, String>,
    /// File offset of the first tensor's bytes.
    pub data: u64,
}

fn bad(m: impl std::fmt::Display) -> Error {
    Error::new(Code::Inval, format!("not a safetensors file: {m}"))
}

/// Length of the header after the [`PREFIX`], in a file of `size` bytes. `EINVAL` if the file is
/// too short for it or the header is too long.
pub fn header_len(prefix: &[u8], size: u64) -> Result<usize> {
    let prefix = prefix.first_chunk::<PREFIX>().ok_or_else(|| bad("it has fewer than 8 bytes"))?;
    let n = u64::from_le_bytes(*prefix);
    if n > LONGEST {
        return Err(bad(format!("it announces a header of {n} bytes, more than {LONGEST}")));
    }
    if n > size.saturating_sub(PREFIX as u64) {
        return Err(bad(format!("it announces a header of {n} bytes, but has {size} bytes")));
    }
    Ok(n as usize)
}

impl Header {
    /// Parses the bytes after the [`PREFIX`], in a file of `size` bytes. `EINVAL` unless every
    /// tensor has as many bytes as its type and shape require, and all together fill the file from
    /// the header to the end without gaps.
    pub fn parse(json: &[u8], size: u64) -> Result<Header> {
        if json.first() != Some(&b'{') {
            return Err(bad("its header does not start with '{'"));
        }
        let m: Metadata = serde_json::from_slice(json).map_err(|e| bad(format!("header: {e}")))?;
        let data = (PREFIX + json.len()) as u64;
        let end = data
            .checked_add(m.data_len() as u64)
            .ok_or_else(|| bad("its tensors are larger than any file"))?;
        if end != size {
            return Err(bad(format!("its tensors end at byte {end}, but it has {size} bytes")));
        }
        let tensor = |name: String| {
            let i = m.info(&name).ok_or_else(|| bad(format!("it has tensor '{name}' twice")))?;
            let (begin, end) = i.data_offsets;
            let (offset, len) = (data + begin as u64, (end - begin) as u64);
            Ok(Tensor { name, dtype: i.dtype, shape: i.shape.clone(), offset, len })
        };
        let tensors = m.offset_keys().into_iter().map(tensor).collect::<Result<_>>()?;
        let notes = m.metadata().iter().flatten().map(|(k, v)| (k.clone(), v.clone())).collect();
        Ok(Header { tensors, notes, data })
    }

    /// A layout of the tensors in one block of memory: the offset of each, and the size of the
    /// block. As in the file, if every tensor is then aligned to its element size; otherwise each
    /// is placed separately.
    pub fn layout(&self) -> (Vec<u64>, u64) {
        let aligned = |t: &Tensor| {
            (t.offset - self.data).is_multiple_of((t.dtype.bitsize() as u64 / 8).max(1))
        };
        if self.tensors.iter().all(aligned) {
            let places = self.tensors.iter().map(|t| t.offset - self.data).collect();
            return (places, self.tensors.last().map_or(0, |t| t.offset - self.data + t.len));
        }
        let mut end = 0;
        let place = |t: &Tensor| {
            let at = end;
            end = (at + t.len).next_multiple_of(ALIGN);
            at
        };
        (self.tensors.iter().map(place).collect(), end)
    }
}

/// A tensor that is to be written.
#[derive(Clone, Debug)]
pub struct New {
    /// Its name.
    pub name: String,
    /// Type of its elements.
    pub dtype: Dtype,
    /// Elements in each dimension.
    pub shape: Vec<usize>,
    /// Its address in the device's memory, where it lies without gaps.
    pub gpu: u64,
}

/// Address and length of each.
pub type Ranges = Vec<(u64, u64)>;

/// Returns the beginning of a file with these tensors, and the ranges of the device's memory that
/// follow it, in order: the types with the largest elements first, as the format's library does it,
/// so that each is aligned. `EINVAL` for a name that occurs twice or is reserved by the format, or
/// a tensor without a whole number of bytes.
pub fn build(tensors: &[New], notes: &BTreeMap<String, String>) -> Result<(Vec<u8>, Ranges)> {
    let inval = |t: &New, m: &str| Error::new(Code::Inval, format!("tensor '{}': {m}", t.name));
    let mut names = HashSet::new();
    for t in tensors {
        if t.name == "__metadata__" {
            return Err(inval(t, "this name is reserved by the format"));
        }
        if !names.insert(&t.name) {
            return Err(inval(t, "is given twice"));
        }
    }
    let mut order: Vec<&New> = tensors.iter().collect();
    order.sort_by(|a, b| b.dtype.cmp(&a.dtype).then_with(|| a.name.cmp(&b.name)));
    let (mut at, mut infos, mut ranges) = (0usize, Vec::new(), Vec::new());
    for t in order {
        let bits = t.shape.iter().try_fold(t.dtype.bitsize(), |n, d| n.checked_mul(*d));
        let len = bits
            .filter(|n| n % 8 == 0)
            .map(|n| n / 8)
            .ok_or_else(|| inval(t, "is not a whole number of bytes long"))?;
        let end = at.checked_add(len).ok_or_else(|| inval(t, "is larger than any file"))?;
        infos.push((
            t.name.clone(),
            TensorInfo { dtype: t.dtype, shape: t.shape.clone(), data_offsets: (at, end) },
        ));
        ranges.push((t.gpu, len as u64));
        at = end;
    }
    let notes =
        (!notes.is_empty()).then(|| notes.iter().map(|(k, v)| (k.clone(), v.clone())).collect());
    let wrong = |e: &dyn std::fmt::Display| {
        Error::new(Code::Inval, format!("the header cannot be written: {e}"))
    };
    let m = Metadata::new(notes, infos).map_err(|e| wrong(&e))?;
    let mut json = serde_json::to_vec(&m).map_err(|e| wrong(&e))?;
    json.resize(json.len().next_multiple_of(PREFIX), b' ');
    if json.len() as u64 > LONGEST {
        return Err(wrong(&format!("it would have {} bytes, more than {LONGEST}", json.len())));
    }
    Ok(([&(json.len() as u64).to_le_bytes()[..], &json].concat(), ranges))
}

/// For fuzzing and tests: parses a file that begins with these bytes.
#[doc(hidden)]
pub fn read(file: &[u8], size: u64) -> Result<Header> {
    let n = header_len(file, size)?;
    let json = file.get(PREFIX..PREFIX + n).ok_or_else(|| bad("it ends within its header"))?;
    let h = Header::parse(json, size)?;
    let (mut at, (places, room)) = (h.data, h.layout());
    for (t, place) in h.tensors.iter().zip(&places) {
        assert!(t.offset == at && t.offset + t.len <= size && place + t.len <= room, "{t:?}");
        at += t.len;
    }
    assert_eq!((at, places.len()), (size, h.tensors.len()));
    Ok(h)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn file(json: &str, data: usize) -> Vec<u8> {
        [&(json.len() as u64).to_le_bytes()[..], json.as_bytes(), &vec![0; data]].concat()
    }

    fn parsed(json: &str, data: usize) -> Result<Header> {
        let f = file(json, data);
        read(&f, f.len() as u64)
    }

    #[test]
    fn a_header_is_read_as_the_format_says() {
        let json = r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"a":{"dtype":"BF16","shape":[],"data_offsets":[24,26]},"none":{"dtype":"I64","shape":[0,7],"data_offsets":[26,26]}}   "#;
        let h = parsed(json, 26).unwrap();
        assert_eq!(h.notes["format"], "pt");
        assert_eq!(h.data, 8 + json.len() as u64);
        let seen: Vec<_> =
            h.tensors.iter().map(|t| (&t.name[..], t.dtype, t.offset - h.data, t.len)).collect();
        assert_eq!(seen[..2], [("b", Dtype::F32, 0, 24), ("a", Dtype::BF16, 24, 2)]);
        assert_eq!(h.tensors[0].shape, [2, 3]);
        // The empty tensor would begin at 26, which is not aligned to 8 bytes.
        assert_eq!(h.layout(), (vec![0, 256, 512], 512));
        assert_eq!(parsed("{}", 0).unwrap().layout(), (vec![], 0));
    }

    #[test]
    fn headers_that_lie_are_refused() {
        let one = |offsets: &str, dtype: &str, shape: &str| {
            format!(r#"{{"t":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
        };
        for (json, data) in [
            (one("[0,4]", "F32", "[1]"), 3),
            (one("[0,4]", "F32", "[1]"), 5),
            (one("[1,5]", "F32", "[1]"), 5),
            (one("[4,0]", "F32", "[1]"), 4),
            (one("[0,8]", "F32", "[1]"), 8),
            (one("[0,4]", "F33", "[1]"), 4),
            (one("[0,4]", "F32", "[-1]"), 4),
            (one("[0,4]", "F32", "[4294967296,4294967296]"), 4),
            (one("[0,18446744073709551615]", "U8", "[18446744073709551615]"), 4),
            (one("[0,18446744073709551616]", "U8", "[1]"), 4),
            (one("[0,1]", "F4", "[1]"), 1),
            (one("[0]", "U8", "[1]"), 1),
            ("{".into(), 0),
            ("[]".into(), 0),
            (" {}".into(), 0),
            ("{}{}".into(), 0),
            (r#"{"__metadata__":{"a":1}}"#.into(), 0),
            (r#"{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"u":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#.into(), 1),
            ("[".repeat(100_000), 0),
        ] {
            let e = parsed(&json, data).unwrap_err();
            let start = &json[..json.len().min(120)];
            assert!(e.code == Code::Inval && e.message.contains("not a safetensors file"), "{start}: {e}");
        }
        for (prefix, size) in
            [(&[][..], 0), (&[1; 7], 7), (&[255; 8], u64::MAX), (&[9, 0, 0, 0, 0, 0, 0, 0], 16)]
        {
            assert_eq!(header_len(prefix, size).unwrap_err().code, Code::Inval, "{prefix:?}");
        }
    }

    fn new(name: &str, dtype: Dtype, shape: &[usize], gpu: u64) -> New {
        New { name: name.into(), dtype, shape: shape.into(), gpu }
    }

    #[test]
    fn what_is_built_is_read_back() {
        let tensors = [
            new("small", Dtype::U8, &[3], 1000),
            new("wide", Dtype::F64, &[2, 1], 2000),
            new("half", Dtype::BF16, &[], 3000),
        ];
        let notes = BTreeMap::from([("step".to_string(), "7".to_string())]);
        let (head, ranges) = build(&tensors, &notes).unwrap();
        assert_eq!(ranges, [(2000, 16), (3000, 2), (1000, 3)]);
        assert!(head.len().is_multiple_of(8));
        let h = read(&head, head.len() as u64 + 21).unwrap();
        assert_eq!(h.notes, notes);
        let names: Vec<_> = h.tensors.iter().map(|t| &t.name[..]).collect();
        assert_eq!((names, h.layout().1), (vec!["wide", "half", "small"], 21));
        for (bad, word) in [
            (vec![new("a", Dtype::U8, &[1], 0), new("a", Dtype::U8, &[1], 0)], "twice"),
            (vec![new("__metadata__", Dtype::U8, &[1], 0)], "reserved by the format"),
            (vec![new("a", Dtype::F4, &[1], 0)], "whole number"),
            (vec![new("a", Dtype::U8, &[usize::MAX, 2], 0)], "whole number"),
        ] {
            let e = build(&bad, &notes).unwrap_err();
            assert!(e.code == Code::Inval && e.message.contains(word), "{e}");
        }
    }

    proptest! {
        #[test]
        fn whatever_a_file_says_it_is_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200), size in any::<u64>()) {
            let _ = read(&bytes, size);
            let _ = read(&file(&String::from_utf8_lossy(&bytes), 3), size);
        }

        #[test]
        fn damaged_headers_are_read_or_refused(at in any::<prop::sample::Index>(), to in any::<u8>()) {
            let (head, _) = build(&[new("a", Dtype::F32, &[4], 0), new("b", Dtype::U8, &[5], 0)], &BTreeMap::new()).unwrap();
            let mut f = [&head[..], &[0; 21]].concat();
            let i = at.index(head.len());
            f[i] = to;
            let _ = read(&f, f.len() as u64);
        }
    }
}
