//! Counts which rows of the tables in `docs/` were taken by real code, for tests that require every
//! row to be taken. Counts are per thread: taking a row costs an addition. The simulator, which
//! runs everything in one thread, reads what its runs took.

/// Declares the rows of a table, each with its name in the documentation.
#[macro_export]
macro_rules! rows {
    ($(#[$meta:meta])* pub enum $name:ident { $($(#[$of_row:meta])* $row:ident = $text:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name { $($(#[$of_row])* $row,)* }

        impl $name {
            /// All names, in the order of the table.
            pub const NAMES: &'static [&'static str] = &[$($text,)*];

            fn with<T>(f: impl FnOnce(&[std::cell::Cell<u64>]) -> T) -> T {
                use std::cell::Cell;
                thread_local! {
                    static TAKEN: [Cell<u64>; $name::NAMES.len()] =
                        const { [const { Cell::new(0) }; $name::NAMES.len()] };
                }
                TAKEN.with(|t| f(t))
            }

            /// Notes that this thread takes this row.
            pub fn taken(self) {
                $name::with(|t| t[self as usize].set(t[self as usize].get().wrapping_add(1)));
            }

            /// Each row's name, and how often this thread has taken it.
            pub fn counts() -> Vec<(&'static str, u64)> {
                $name::with(|t| $name::NAMES.iter().copied().zip(t.iter().map(|c| c.get())).collect())
            }

            /// Resets the counts of this thread.
            pub fn reset() {
                $name::with(|t| t.iter().for_each(|c| c.set(0)));
            }
        }
    };
}

#[cfg(test)]
mod tests {
    rows! {
        /// A table.
        pub enum Some {
            One = "one",
            Other = "other",
        }
    }

    #[test]
    fn rows_are_counted_by_thread() {
        Some::Other.taken();
        Some::Other.taken();
        Some::One.taken();
        assert_eq!(Some::counts(), [("one", 1), ("other", 2)]);
        std::thread::spawn(|| assert_eq!(Some::counts(), [("one", 0), ("other", 0)]))
            .join()
            .unwrap();
        Some::reset();
        assert_eq!(
            (Some::counts(), Some::NAMES),
            (vec![("one", 0), ("other", 0)], &["one", "other"][..])
        );
    }
}
