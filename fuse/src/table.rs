//! The kernel's table of mounts, and the mount flags by name.

use rustix::mount::MountFlags;
pub use strake_mount_table::{Mounted, mounts, stays_mounted, topmost};

/// Flags of mount(2): the option that sets each, and the option that clears it.
const FLAGS: [(&str, &str, MountFlags); 11] = [
    ("nosuid", "suid", MountFlags::NOSUID),
    ("nodev", "dev", MountFlags::NODEV),
    ("noexec", "exec", MountFlags::NOEXEC),
    ("noatime", "atime", MountFlags::NOATIME),
    ("relatime", "norelatime", MountFlags::RELATIME),
    ("strictatime", "nostrictatime", MountFlags::STRICTATIME),
    ("nodiratime", "diratime", MountFlags::NODIRATIME),
    ("lazytime", "nolazytime", MountFlags::LAZYTIME),
    ("sync", "async", MountFlags::SYNCHRONOUS),
    ("dirsync", "", MountFlags::DIRSYNC),
    ("silent", "loud", MountFlags::SILENT),
];

/// The flags of FUSE mounts unless set otherwise.
pub const DEFAULT_FLAGS: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV);

/// The names of all options that are flags.
pub fn flag_names() -> impl Iterator<Item = &'static str> {
    FLAGS.iter().flat_map(|(set, clear, _)| [*set, *clear]).filter(|n| !n.is_empty())
}

/// The names of the options that clear a flag.
pub fn clear_names() -> impl Iterator<Item = &'static str> {
    FLAGS.iter().map(|(_, clear, _)| *clear).filter(|n| !n.is_empty())
}

/// Sets or clears the flag of an option. Returns false if the option is no flag.
pub fn apply_flag(flags: &mut MountFlags, name: &str) -> bool {
    for (set, clear, flag) in FLAGS {
        if name == set || (name == clear && !clear.is_empty()) {
            flags.set(flag, name == set);
            return true;
        }
    }
    false
}

/// The options that change [`DEFAULT_FLAGS`] to these flags.
pub fn flag_options(flags: MountFlags) -> Vec<&'static str> {
    let name = |(set, clear, flag): &(&'static str, &'static str, MountFlags)| match (
        flags.contains(*flag),
        DEFAULT_FLAGS.contains(*flag),
    ) {
        (true, false) => Some(*set),
        (false, true) => Some(*clear),
        _ => None,
    };
    FLAGS.iter().filter_map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_by_name() {
        let mut flags = DEFAULT_FLAGS;
        for name in flag_names() {
            assert!(apply_flag(&mut flags, name), "{name}");
        }
        assert!(!apply_flag(&mut flags, "ro") && !apply_flag(&mut flags, ""));
        flags = DEFAULT_FLAGS;
        assert!(flag_options(flags).is_empty());
        for name in ["suid", "noexec", "sync", "async", "noatime"] {
            apply_flag(&mut flags, name);
        }
        assert_eq!(flag_options(flags), ["suid", "noexec", "noatime"]);
        assert_eq!(flags, MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::NOATIME);
    }
}
