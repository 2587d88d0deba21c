//! Which owners took locks through which handles, and the numbers under which the metadata servers
//! know them. A pure table; the records that the next daemon needs come from [`Around`].
//!
//! The kernel's number for an owner is an address, which another owner may get while an unlock of
//! the former one is still in progress. So the servers get our own numbers, which are never reused.
//! An flock has the number of its handle. The POSIX locks of an owner in one file have a number
//! until the owner has no locks there any more.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::RangeInclusive,
};

use strake_proto::Ino;

/// All locks of an owner in a file: the inode, whether it is an flock, and the kernel's number of
/// the owner or, for an flock, the handle.
pub type Key = (Ino, bool, u64);

/// The outcome of a request for a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The owner holds a lock in the file.
    Holds,
    /// Nothing was changed.
    Refused,
    /// The outcome is unknown, or it is being undone.
    InDoubt,
}

/// A handle through which an owner requested locks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Through<R> {
    kept: Option<R>,
    /// A lock may have been taken through it.
    took: bool,
    asking: u32,
}

/// An owner's state in one file.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Owner<R> {
    number: u64,
    /// Number of requests for locks so far.
    asked: u64,
    handles: BTreeMap<u64, Through<R>>,
}

impl<R> Owner<R> {
    fn asks(&self) -> bool {
        self.handles.values().any(|t| t.asking > 0)
    }
}

/// An owner that has ended in a file, or releases all its locks there.
#[derive(Debug, PartialEq, Eq)]
pub struct Ended<G> {
    pub key: Key,
    pub number: u64,
    /// Handles through which no owner has locks any more.
    pub free: Vec<u64>,
    /// The guard that was made when the owner ended.
    pub guard: G,
}

/// See the module. `R` is the record of an owner and a handle for the next daemon; it exists until
/// it is dropped.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Owners<R> {
    owners: BTreeMap<Key, Owner<R>>,
    /// Files of the owners of POSIX locks, by the kernel's number.
    files: BTreeMap<u64, BTreeSet<Ino>>,
}

impl<R> Default for Owners<R> {
    fn default() -> Owners<R> {
        Owners { owners: BTreeMap::new(), files: BTreeMap::new() }
    }
}

fn of_file(ino: Ino) -> RangeInclusive<Key> {
    (ino, false, 0)..=(ino, true, u64::MAX)
}

/// The state of an owner at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Known {
    pub number: u64,
    asked: u64,
}

/// What the table needs to know or do outside.
pub trait Around {
    type Guard;
    type Record;
    /// A number that was never used.
    fn fresh(&self) -> u64;
    /// Records for the next daemon that an owner requests locks through a handle.
    fn keep(&self, key: Key, handle: u64, number: u64) -> Option<Self::Record>;
    /// Whether an owner of this number is unlocking something in the file.
    fn is_ending(&self, ino: Ino, number: u64) -> bool;
    /// An owner ends from now on. The guard keeps `records` as long as that lasts; they say that
    /// the owner has ended.
    fn ends(&self, key: Key, number: u64, records: Vec<Self::Record>) -> Self::Guard;
}

impl<R> Owners<R> {
    fn enter(&mut self, key: Key, number: u64) -> &mut Owner<R> {
        if !key.1 {
            self.files.entry(key.2).or_default().insert(key.0);
        }
        self.owners.entry(key).or_insert_with(|| Owner {
            number,
            asked: 0,
            handles: BTreeMap::new(),
        })
    }

    fn leave(&mut self, key: &Key) -> Option<Owner<R>> {
        let owner = self.owners.remove(key)?;
        if let Some(files) = self.files.get_mut(&key.2).filter(|_| !key.1) {
            files.remove(&key.0);
            if files.is_empty() {
                self.files.remove(&key.2);
            }
        }
        Some(owner)
    }

    /// A process has one number in all files, so that a deadlock across files is detected. But it
    /// does not get a number under which something is being unlocked in this file.
    fn new_number(&self, (ino, flock, owner): Key, around: &impl Around<Record = R>) -> u64 {
        if flock {
            return owner;
        }
        let elsewhere = self.files.get(&owner).into_iter().flatten();
        let mut known =
            elsewhere.filter_map(|other| Some(self.owners.get(&(*other, false, owner))?.number));
        known.find(|n| !around.is_ending(ino, *n)).unwrap_or_else(|| around.fresh())
    }

    /// Those of these handles through which no owner has locks.
    fn free(&self, ino: Ino, handles: impl Iterator<Item = u64>) -> Vec<u64> {
        let is_used =
            |h: &u64| self.owners.range(of_file(ino)).any(|(_, o)| o.handles.contains_key(h));
        handles.filter(|h| !is_used(h)).collect()
    }

    fn end<A: Around<Record = R>>(&mut self, key: Key, around: &A) -> Option<Ended<A::Guard>> {
        let owner = self.leave(&key)?;
        let (handles, through): (Vec<u64>, Vec<Through<R>>) = owner.handles.into_iter().unzip();
        let guard =
            around.ends(key, owner.number, through.into_iter().filter_map(|t| t.kept).collect());
        Some(Ended {
            key,
            number: owner.number,
            free: self.free(key.0, handles.into_iter()),
            guard,
        })
    }

    /// A lock is requested; returns the owner's number. It is recorded before the request, so that
    /// the next daemon releases what this one may have got. `None`, unless `sure`, if the owner is
    /// known by other handles only: the kernel may have reused its number for another owner since.
    /// Then the caller must first find out whether those handles are closed.
    pub fn asks(
        &mut self,
        key: Key,
        handle: u64,
        sure: bool,
        around: &impl Around<Record = R>,
    ) -> Option<u64> {
        let known = self.owners.get(&key);
        if !sure && known.is_some_and(|o| !o.handles.contains_key(&handle)) {
            return None;
        }
        let number = known.map_or_else(|| self.new_number(key, around), |o| o.number);
        let owner = self.enter(key, number);
        owner.asked += 1;
        let new = || Through { kept: None, took: false, asking: 0 };
        let through = owner.handles.entry(handle).or_insert_with(new);
        if through.kept.is_none() {
            through.kept = around.keep(key, handle, number);
        }
        through.asking += 1;
        Some(number)
    }

    /// The request for a lock is over.
    pub fn asked(&mut self, key: Key, handle: u64, number: u64, outcome: Outcome) {
        let Some(owner) = self.owners.get_mut(&key).filter(|o| o.number == number) else { return };
        let Some(through) = owner.handles.get_mut(&handle) else { return };
        through.asking -= 1;
        through.took |= outcome != Outcome::Refused;
        if !through.took && through.asking == 0 {
            owner.handles.remove(&handle);
        }
        if owner.handles.is_empty() {
            self.leave(&key);
        }
    }

    /// The number of an owner that may have locks in the file.
    pub fn number(&self, key: Key) -> Option<u64> {
        self.owners.get(&key).map(|o| o.number)
    }

    /// The state that [`Owners::has_none`] needs, taken before the unlock.
    pub fn known(&self, key: Key) -> Option<Known> {
        self.owners.get(&key).map(|o| Known { number: o.number, asked: o.asked })
    }

    /// The owner had no locks left there after its unlock. Returns the handles through which no
    /// owner has locks any more.
    pub fn has_none(&mut self, key: Key, then: Known) -> Vec<u64> {
        if self
            .owners
            .get(&key)
            .is_none_or(|o| (o.number, o.asked) != (then.number, then.asked) || o.asks())
        {
            return Vec::new();
        }
        let handles = self.leave(&key).map(|o| o.handles).unwrap_or_default();
        self.free(key.0, handles.into_keys())
    }

    /// A descriptor of the owner was closed: the owner releases all its locks in the file.
    pub fn gives_up<A: Around<Record = R>>(
        &mut self,
        key: Key,
        around: &A,
    ) -> Option<Ended<A::Guard>> {
        let owner = self.owners.get(&key)?;
        if owner.asks() {
            // Another of its threads may still get a lock, under the same number.
            let number = owner.number;
            return Some(Ended {
                key,
                number,
                free: Vec::new(),
                guard: around.ends(key, number, Vec::new()),
            });
        }
        self.end(key, around)
    }

    /// The handle is closed: returns owners that had locks only through it.
    pub fn closed<A: Around<Record = R>>(
        &mut self,
        ino: Ino,
        handle: u64,
        around: &A,
    ) -> Vec<Ended<A::Guard>> {
        let mut last = Vec::new();
        for (key, owner) in self.owners.range_mut(of_file(ino)) {
            let alone = owner.handles.len() == 1;
            if alone && owner.handles.contains_key(&handle) {
                last.push(*key);
            } else {
                owner.handles.remove(&handle);
            }
        }
        last.into_iter().filter_map(|key| self.end(key, around)).collect()
    }

    /// Takes over an owner's locks through a handle of an earlier daemon.
    pub fn adopt(&mut self, key: Key, number: u64, handle: u64, kept: R) {
        self.enter(key, number)
            .handles
            .insert(handle, Through { kept: Some(kept), took: true, asking: 0 });
    }

    /// The records of owners for the next daemon.
    pub fn kept(&self) -> impl Iterator<Item = &R> {
        self.owners.values().flat_map(|o| o.handles.values()).filter_map(|t| t.kept.as_ref())
    }

    /// Whether no owner has or requests locks.
    pub fn is_empty(&self) -> bool {
        self.owners.is_empty() && self.files.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::*;

    /// Gives out numbers from 100 on, and records what ends.
    #[derive(Default)]
    struct World(Cell<u64>, RefCell<Vec<(Ino, u64)>>);

    impl Around for World {
        type Guard = ();
        type Record = ();

        fn fresh(&self) -> u64 {
            self.0.set(self.0.get() + 1);
            99 + self.0.get()
        }

        fn is_ending(&self, ino: Ino, number: u64) -> bool {
            self.1.borrow().contains(&(ino, number))
        }

        fn keep(&self, _: Key, _: u64, _: u64) -> Option<()> {
            None
        }

        fn ends(&self, key: Key, number: u64, _: Vec<()>) {
            self.1.borrow_mut().push((key.0, number));
        }
    }

    fn take(o: &mut Owners<()>, w: &World, key: Key, handle: u64) -> u64 {
        let number = o.asks(key, handle, true, w).unwrap();
        o.asked(key, handle, number, Outcome::Holds);
        number
    }

    fn keys(ended: Vec<Ended<()>>) -> Vec<(Key, u64)> {
        ended.into_iter().map(|e| (e.key, e.number)).collect()
    }

    #[test]
    fn the_next_open_file_at_an_address_is_another_owner() {
        let (mut o, w) = (Owners::default(), World::default());
        let ofd = (5, false, 77);
        assert_eq!(take(&mut o, &w, ofd, 1), 100);
        assert_eq!(o.asks(ofd, 1, false, &w), Some(100), "the same handle");
        o.asked(ofd, 1, 100, Outcome::Refused);
        assert_eq!(o.asks(ofd, 2, false, &w), None, "is the first one closed?");
        assert_eq!(keys(o.closed(5, 1, &w)), [(ofd, 100)]);
        assert_eq!(o.asks(ofd, 2, false, &w), Some(101));
        // A late outcome of the first owner does not affect the second one.
        o.asked(ofd, 1, 100, Outcome::InDoubt);
        assert_eq!(
            (o.has_none(ofd, Known { number: 100, asked: 2 }), o.number(ofd)),
            (vec![], Some(101))
        );
        o.asked(ofd, 2, 101, Outcome::Holds);
        assert!(o.closed(5, 1, &w).is_empty(), "a release that comes twice");
    }

    #[test]
    fn an_flock_has_the_number_of_its_handle() {
        let (mut o, w) = (Owners::default(), World::default());
        assert_eq!((take(&mut o, &w, (5, true, 8), 8), take(&mut o, &w, (5, true, 9), 9)), (8, 9));
        assert_eq!(keys(o.closed(5, 8, &w)), [((5, true, 8), 8)]);
        assert_eq!(o.number((5, true, 9)), Some(9));
    }

    #[test]
    fn a_refused_try_leaves_nothing_and_one_in_doubt_does() {
        let (mut o, w) = (Owners::default(), World::default());
        for (outcome, left) in
            [(Outcome::Refused, None), (Outcome::InDoubt, Some(3)), (Outcome::Refused, Some(3))]
        {
            let number = o.asks((5, true, 3), 3, false, &w).unwrap();
            o.asked((5, true, 3), 3, number, outcome);
            assert_eq!(o.number((5, true, 3)), left, "{outcome:?}");
        }
        assert_eq!(keys(o.closed(5, 3, &w)), [((5, true, 3), 3)]);
        assert!(o.is_empty());
    }

    #[test]
    fn a_process_has_one_number_in_all_files_but_not_beside_its_own_unlock() {
        let (mut o, w) = (Owners::default(), World::default());
        let (f, g) = ((5, false, 1), (6, false, 1));
        assert_eq!(
            (take(&mut o, &w, f, 1), take(&mut o, &w, g, 2), take(&mut o, &w, (5, false, 2), 1)),
            (100, 100, 101)
        );
        assert_eq!(
            o.gives_up(f, &w).map(|e| (e.number, e.free)),
            Some((100, vec![])),
            "another locks through it"
        );
        assert_eq!(take(&mut o, &w, f, 1), 102, "the unlock of the former number is under way");
        w.1.borrow_mut().clear();
        assert_eq!(o.gives_up(f, &w).map(|e| e.number), Some(102));
        assert_eq!(take(&mut o, &w, f, 1), 100);
        assert!(o.gives_up((7, false, 1), &w).is_none());
    }

    #[test]
    fn a_wait_outlives_the_close_of_another_descriptor() {
        let (mut o, w) = (Owners::default(), World::default());
        let posix = (5, false, 1);
        let number = take(&mut o, &w, posix, 1);
        assert_eq!(o.asks(posix, 2, true, &w), Some(number));
        assert_eq!(o.gives_up(posix, &w).map(|e| e.number), Some(number));
        let known = o.known(posix).unwrap();
        assert!(o.has_none(posix, known).is_empty() && o.number(posix) == Some(number));
        o.asked(posix, 2, number, Outcome::Holds);
        assert!(
            o.closed(5, 1, &w).is_empty(),
            "the process may have locks through the other handle"
        );
        assert_eq!(keys(o.closed(5, 2, &w)), [(posix, number)]);
    }

    #[test]
    fn handles_are_free_when_nobody_has_locks_through_them() {
        let (mut o, w) = (Owners::default(), World::default());
        let (posix, flock) = ((5, false, 1), (5, true, 4));
        let number = take(&mut o, &w, posix, 4);
        take(&mut o, &w, flock, 4);
        assert_eq!(o.has_none(flock, o.known(flock).unwrap()), Vec::<u64>::new());
        let before = o.known(posix).unwrap();
        assert_eq!(take(&mut o, &w, posix, 4), number);
        assert_eq!(o.has_none(posix, before), Vec::<u64>::new(), "another thread has locked since");
        assert_eq!(o.has_none(posix, o.known(posix).unwrap()), [4]);
    }

    /// The kernel's requests, all of them with the one address 77.
    #[derive(Clone, Copy, Debug)]
    enum Asked {
        Lock(u64),
        Release(u64),
    }

    /// A noted request for a lock.
    #[derive(Clone, Copy)]
    enum Task {
        /// Noted, for this handle.
        Noted(u64),
        /// Waits until everything that was queued is noted.
        Settles(u64),
        /// Sent to the servers for this handle, under this number.
        Sent(u64, u64),
    }

    /// A mount with two threads, and its servers.
    #[derive(Default)]
    struct Mount {
        owners: Owners<()>,
        world: World,
        queue: Vec<Asked>,
        threads: [Option<Asked>; 2],
        tasks: Vec<Task>,
        /// The number that holds the lock.
        held: Option<u64>,
        /// The handle that was told that it has the lock, and its number.
        told: Option<(u64, u64)>,
    }

    const OFD: Key = (5, false, 77);

    impl Mount {
        /// All events that may happen next.
        fn next(&self) -> Vec<(char, usize)> {
            let mut all = Vec::new();
            let is_quiet = self.queue.is_empty() && self.threads.iter().all(Option::is_none);
            for (n, thread) in self.threads.iter().enumerate() {
                match thread {
                    None if !self.queue.is_empty() => all.push(('t', n)),
                    None => {}
                    Some(_) => all.push(('n', n)),
                }
            }
            for (n, task) in self.tasks.iter().enumerate() {
                let can = match task {
                    Task::Noted(_) => true,
                    Task::Settles(_) => is_quiet,
                    // A waiting request: it is answered when the lock is free.
                    Task::Sent(_, number) => self.held.is_none_or(|h| h == *number),
                };
                all.extend(can.then_some(('a', n)));
            }
            let unlocks = self.world.1.borrow().len();
            all.extend((0..unlocks).map(|n| ('u', n)));
            all
        }

        fn ask(&mut self, handle: u64, sure: bool) {
            let number = self.owners.asks(OFD, handle, sure, &self.world);
            self.tasks.push(number.map_or(Task::Settles(handle), |n| Task::Sent(handle, n)));
        }

        fn step(&mut self, (what, n): (char, usize)) {
            match what {
                't' => self.threads[n] = Some(self.queue.remove(0)),
                'n' => match self.threads[n].take() {
                    Some(Asked::Lock(handle)) => self.tasks.push(Task::Noted(handle)),
                    Some(Asked::Release(handle)) => {
                        drop(self.owners.closed(5, handle, &self.world))
                    }
                    None => {}
                },
                'a' => match self.tasks.remove(n) {
                    Task::Noted(handle) => self.ask(handle, false),
                    Task::Settles(handle) => self.ask(handle, true),
                    Task::Sent(handle, number) => {
                        self.owners.asked(OFD, handle, number, Outcome::Holds);
                        (self.held, self.told) = (Some(number), Some((handle, number)));
                    }
                },
                _ => {
                    let (_, number) = self.world.1.borrow_mut().remove(n);
                    self.held = self.held.filter(|h| *h != number);
                }
            }
            let of_second = self.told.filter(|(handle, _)| *handle == 2);
            assert!(
                of_second.is_none_or(|(_, n)| self.held == Some(n)),
                "the second one's lock was taken"
            );
        }
    }

    /// A lock is taken through handle 1, which is closed. The next open file gets the same address
    /// and locks again, before any of that is noted. In every order of threads, unlocks and
    /// requests, the second one has its lock, and has it alone.
    #[test]
    fn in_every_order_of_events_the_next_one_at_an_address_keeps_its_lock() {
        let (mut todo, mut ends) = (vec![Vec::new()], 0);
        while let Some(path) = todo.pop() {
            let mut m = Mount::default();
            let first = take(&mut m.owners, &m.world, OFD, 1);
            m.held = Some(first);
            m.queue = vec![Asked::Release(1), Asked::Lock(2)];
            path.iter().for_each(|event| m.step(*event));
            let next = m.next();
            if next.is_empty() {
                ends += 1;
                assert_eq!(m.told.map(|(h, n)| (h, Some(n))), Some((2, m.held)), "{path:?}");
            }
            todo.extend(next.into_iter().map(|event| [&path[..], &[event]].concat()));
        }
        assert!(ends > 10, "{ends} orders");
    }
}
