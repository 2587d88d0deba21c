//! Parameters that a program sets before it opens the driver. The real library gets them when it is
//! opened. Here only the size of a batch has an effect.

use std::{
    collections::BTreeMap,
    ffi::{CString, c_int},
};

use crate::{
    abi,
    errors::{CallError, Done},
    vendor::Vendor,
};

/// Defaults of the size parameters, by their numbers.
const SIZES: [usize; 12] = [0, 128, 4, 8192, 4, 16384, 131_072, 1024, 33_554_432, 128, 4, 0];
/// The number of `CUFILE_PARAM_PROPERTIES_IO_BATCHSIZE`.
const BATCH_SIZE: c_int = 9;
/// `CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE`, `..._ALLOW_SYSTEM_MEMORY`.
const TRUE_AT_FIRST: [c_int; 2] = [1, 6];
const BOOLS: c_int = 14;
const STRINGS: c_int = 4;
/// The largest allowed size of a batch.
const MOST_BATCH: usize = 4096;

/// What was set.
#[derive(Default)]
pub struct Set {
    sizes: BTreeMap<c_int, usize>,
    bools: BTreeMap<c_int, bool>,
    strings: BTreeMap<c_int, CString>,
    /// Slab sizes and counts of the two pools.
    slabs: [Option<(Vec<usize>, Vec<usize>)>; 2],
}

fn known(ok: bool) -> Done<()> {
    if ok { Ok(()) } else { Err(CallError::Op(abi::INVALID_VALUE)) }
}

impl Set {
    pub fn size(&self, n: c_int) -> Done<usize> {
        known((0..SIZES.len() as c_int).contains(&n))?;
        Ok(self.sizes.get(&n).copied().unwrap_or(SIZES[n as usize]))
    }

    pub fn set_size(&mut self, n: c_int, value: usize) -> Done<()> {
        known(
            (0..SIZES.len() as c_int).contains(&n)
                && (n != BATCH_SIZE || (1..=MOST_BATCH).contains(&value)),
        )?;
        self.sizes.insert(n, value);
        Ok(())
    }

    pub fn bool(&self, n: c_int) -> Done<bool> {
        known((0..BOOLS).contains(&n))?;
        Ok(self.bools.get(&n).copied().unwrap_or(TRUE_AT_FIRST.contains(&n)))
    }

    pub fn set_bool(&mut self, n: c_int, value: bool) -> Done<()> {
        known((0..BOOLS).contains(&n))?;
        self.bools.insert(n, value);
        Ok(())
    }

    pub fn string(&self, n: c_int) -> Done<CString> {
        known((0..STRINGS).contains(&n))?;
        Ok(self.strings.get(&n).cloned().unwrap_or_default())
    }

    pub fn set_string(&mut self, n: c_int, value: CString) -> Done<()> {
        known((0..STRINGS).contains(&n))?;
        self.strings.insert(n, value);
        Ok(())
    }

    pub fn slabs(&self, pool: usize) -> Option<&(Vec<usize>, Vec<usize>)> {
        self.slabs[pool].as_ref()
    }

    pub fn set_slabs(&mut self, pool: usize, sizes: &[usize], counts: &[usize]) -> Done<()> {
        known(!sizes.is_empty() && sizes.iter().chain(counts).all(|n| *n > 0))?;
        self.slabs[pool] = Some((sizes.to_vec(), counts.to_vec()));
        Ok(())
    }

    /// The number of entries that a batch may have.
    pub fn batch(&self) -> usize {
        self.sizes.get(&BATCH_SIZE).copied().unwrap_or(SIZES[BATCH_SIZE as usize])
    }

    /// The smallest and largest allowed value of a size parameter.
    pub fn bounds(&self, n: c_int) -> Done<(usize, usize)> {
        self.size(n)?;
        Ok(if n == BATCH_SIZE { (1, MOST_BATCH) } else { (0, usize::MAX) })
    }

    /// Passes the parameters to the real library, before its driver is opened. Errors are ignored:
    /// the library then uses its defaults.
    pub fn pass_on(&self, vendor: &Vendor) {
        for (n, value) in &self.sizes {
            // SAFETY: numbers only.
            let _ = vendor.control(vendor.set_size, |f| unsafe { f(*n, *value) });
        }
        for (n, value) in &self.bools {
            // SAFETY: numbers only.
            let _ = vendor.control(vendor.set_bool, |f| unsafe { f(*n, u8::from(*value)) });
        }
        for (n, value) in &self.strings {
            // SAFETY: a string that ends with a zero.
            let _ = vendor.control(vendor.set_string, |f| unsafe { f(*n, value.as_ptr()) });
        }
        for (slabs, f) in self.slabs.iter().zip([vendor.set_posix_slabs, vendor.set_gpu_slabs]) {
            if let Some((sizes, counts)) = slabs {
                // SAFETY: as many sizes as counts.
                let _ = vendor.control(f, |f| unsafe {
                    f(sizes.as_ptr(), counts.as_ptr(), sizes.len() as c_int)
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_set_is_told_and_what_is_no_parameter_is_refused() {
        let mut s = Set::default();
        assert_eq!(
            (s.size(9), s.bool(1), s.bool(2), s.batch()),
            (Ok(128), Ok(true), Ok(false), 128)
        );
        s.set_size(9, 7).unwrap();
        s.set_bool(1, false).unwrap();
        s.set_string(0, c"DEBUG".into()).unwrap();
        assert_eq!((s.size(9), s.bool(1), s.batch()), (Ok(7), Ok(false), 7));
        assert_eq!((s.string(0).unwrap(), s.string(1).unwrap()), (c"DEBUG".into(), c"".into()));
        let bad = Err(CallError::Op(abi::INVALID_VALUE));
        for n in [-1, 12, 14, i32::MAX] {
            assert_eq!(s.size(n).map(drop), bad);
            assert_eq!(s.set_size(n, 1), bad);
            assert_eq!(s.set_string(n, c"".into()), bad);
        }
        assert_eq!((s.set_size(9, 0), s.set_size(9, 5000), s.set_bool(14, true)), (bad, bad, bad));
        assert_eq!((s.set_slabs(0, &[], &[]), s.set_slabs(1, &[4], &[0])), (bad, bad));
        s.set_slabs(1, &[4], &[2]).unwrap();
        assert_eq!(s.slabs(1), Some(&(vec![4], vec![2])));
        assert_eq!(s.bounds(9), Ok((1, MOST_BATCH)));
    }
}
