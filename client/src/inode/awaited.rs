//! Appends that the previous client of the mount had in progress and that may be repeated. Reports
//! wait for them, and no other append goes below their end.

use tokio::sync::watch;

#[derive(Default)]
struct Appends {
    count: usize,
    /// The highest end of them.
    end: u64,
}

/// See the module.
#[derive(Default)]
pub(crate) struct Awaited(watch::Sender<Appends>);

impl Awaited {
    /// An append up to this end may be repeated.
    pub fn begin(&self, end: u64) {
        self.0.send_modify(|a| *a = Appends { count: a.count + 1, end: end.max(a.end) });
    }

    /// One of them is done, or will not come.
    pub fn end(&self) {
        self.0.send_modify(|a| {
            a.count -= 1;
            if a.count == 0 {
                a.end = 0;
            }
        });
    }

    /// The offset for another append that finds the file ending at `size`.
    pub fn offset(&self, size: u64) -> u64 {
        size.max(self.0.borrow().end)
    }

    /// Returns when none is awaited any more.
    pub async fn none(&self) {
        let _ = self.0.subscribe().wait_for(|a| a.count == 0).await;
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn others_append_behind_them_until_all_are_done() {
        let a = Awaited::default();
        assert_eq!(a.offset(10), 10);
        assert!(a.none().now_or_never().is_some());
        a.begin(100);
        a.begin(50);
        assert_eq!((a.offset(10), a.offset(200)), (100, 200));
        a.end();
        assert_eq!(a.offset(10), 100, "the one that is left may be the longer one");
        assert!(a.none().now_or_never().is_none());
        a.end();
        assert_eq!(a.offset(10), 10);
        assert!(a.none().now_or_never().is_some());
    }
}
