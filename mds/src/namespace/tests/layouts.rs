//! Layouts, placement and space.

use super::*;
use strake_proto::{layout::StripeMap, map::ChainExt};

fn spec() -> pb::LayoutSpec {
    pb::LayoutSpec::default()
}

fn create(
    fs: &mut Fs,
    parent: Ino,
    spec: pb::LayoutSpec,
) -> Result<(pb::Component, Vec<u32>), Code> {
    let name = bytes(&format!("f{}", fs.index));
    let c = pb::Create {
        parent,
        name,
        mode: 0o644,
        exclusive: true,
        layout: Some(spec),
        flags: 0,
        umask: 0,
    };
    let r = fs.try_one(Op::Create(c))?;
    let layout = r.layout.unwrap();
    let map = fs.ns.map();
    let chains = StripeMap::resolve(r.ino, &layout, &map).unwrap().chains;
    let targets = chains.iter().map(|c| map.chain(*c).unwrap().ost_index()).collect();
    Ok((layout.components[0].clone(), targets))
}

fn targets(fs: &mut Fs, spec: pb::LayoutSpec) -> Vec<u32> {
    create(fs, ROOT, spec).unwrap().1
}

fn distinct(v: &[u32]) -> usize {
    v.iter().collect::<BTreeSet<_>>().len()
}

#[test]
fn defaults_inheritance_and_overrides() {
    let mut fs = Fs::new();
    let (c, t) = create(&mut fs, ROOT, spec()).unwrap();
    assert_eq!((c.stripe_size, c.copies, t.len(), c.pattern), (4 << 20, 1, 1, 0));
    let set = |ino, layout| Op::Setlayout(pb::SetLayout { ino, layout });
    let d = fs.mkdir(ROOT, "d");
    fs.one(set(ROOT, Some(pb::LayoutSpec { stripe_size: 1 << 20, stripe_count: 2, ..spec() })));
    let (c, t) = create(&mut fs, d, spec()).unwrap();
    assert_eq!(
        (c.stripe_size, t.len()),
        (1 << 20, 2),
        "the root's default holds everywhere, at run time"
    );
    fs.one(set(d, Some(pb::LayoutSpec { stripe_count: 3, copies: 2, ..spec() })));
    let e = fs.mkdir(d, "e");
    let (c, t) = create(&mut fs, e, spec()).unwrap();
    assert_eq!((c.stripe_size, c.copies, t.len()), (1 << 20, 2, 3), "copied at mkdir");
    let (c, t) = create(&mut fs, e, pb::LayoutSpec { stripe_count: 1, ..spec() }).unwrap();
    assert_eq!((c.copies, t.len()), (2, 1));
    let g = fs.one(Op::Getlayout(pb::GetLayout { ino: d }));
    assert_eq!(g.spec.unwrap().stripe_count, 3);
    let shown = &g.effective.unwrap().components[0];
    assert_eq!(
        shown.set,
        Some(pb::ChainSetRef { set: u32::MAX, seed: 0, start: u32::MAX, count: 3 })
    );
    assert_eq!((shown.stripe_size, shown.copies, shown.chains.len()), (1 << 20, 2, 0));
    fs.one(set(d, None));
    assert_eq!(fs.one(Op::Getlayout(pb::GetLayout { ino: d })).spec, None);
}

#[test]
fn nonsense_is_refused_with_words() {
    let mut fs = Fs::new();
    let bad = [
        pb::LayoutSpec { stripe_size: 4096, ..spec() },
        pb::LayoutSpec { stripe_count: -2, ..spec() },
        pb::LayoutSpec { stripe_count: 2001, ..spec() },
        pb::LayoutSpec { overstripe: -33, ..spec() },
        pb::LayoutSpec { copies: 4, ..spec() },
        pb::LayoutSpec { pool: "none such".into(), ..spec() },
        pb::LayoutSpec { targets: vec![99], ..spec() },
        pb::LayoutSpec { start: Some(99), ..spec() },
        pb::LayoutSpec { targets: vec![1, 2], stripe_count: 3, ..spec() },
        pb::LayoutSpec { targets: vec![1, 2], start: Some(4), ..spec() },
    ];
    for s in bad {
        assert_eq!(create(&mut fs, ROOT, s.clone()).unwrap_err(), Code::Inval, "{s:?}");
        let layout = Some(s.clone());
        fs.fails(Op::Setlayout(pb::SetLayout { ino: ROOT, layout }), Code::Inval);
    }
}

#[test]
fn explicit_targets_starts_and_overstriping() {
    let mut fs = Fs::new();
    assert_eq!(targets(&mut fs, pb::LayoutSpec { targets: vec![4, 0, 4], ..spec() }), [4, 0, 4]);
    assert_eq!(
        targets(&mut fs, pb::LayoutSpec { start: Some(4), stripe_count: 3, ..spec() }),
        [4, 5, 0]
    );
    let all = targets(&mut fs, pb::LayoutSpec { stripe_count: -1, ..spec() });
    assert_eq!((all.len(), distinct(&all)), (6, 6));
    assert_eq!(targets(&mut fs, pb::LayoutSpec { stripe_count: 100, ..spec() }).len(), 6);
    let twice = targets(&mut fs, pb::LayoutSpec { overstripe: -2, ..spec() });
    assert_eq!((twice.len(), distinct(&twice)), (12, 6));
    assert_eq!(targets(&mut fs, pb::LayoutSpec { overstripe: 9, ..spec() }).len(), 9);
    // Wide ones refer to the chain set and stay small.
    let (c, t) = create(&mut fs, ROOT, pb::LayoutSpec { overstripe: 2000, ..spec() }).unwrap();
    assert_eq!((t.len(), distinct(&t), c.chains.len()), (2000, 6, 0));
    assert!(c.encoded_len() < 100);
}

#[test]
fn pools_bound_the_choice() {
    let mut fs = Fs::new();
    for (action, targets) in [(1, vec![]), (2, vec![1, 3])] {
        let p = pb::PoolChange { pool: "flash".into(), action, targets };
        assert_eq!(fs.log(Command::PoolChange(p)).status, None);
    }
    for _ in 0..20 {
        let (c, t) =
            create(&mut fs, ROOT, pb::LayoutSpec { pool: "flash".into(), ..spec() }).unwrap();
        assert!([1, 3].contains(&t[0]) && c.pool == "flash");
    }
    let all = targets(&mut fs, pb::LayoutSpec { pool: "flash".into(), stripe_count: -1, ..spec() });
    assert_eq!(distinct(&all), 2);
    let d = fs.mkdir(ROOT, "d");
    let layout = Some(pb::LayoutSpec { pool: "flash".into(), ..spec() });
    fs.one(Op::Setlayout(pb::SetLayout { ino: d, layout }));
    assert_eq!(create(&mut fs, d, spec()).unwrap().0.pool, "flash");
    assert_eq!(
        create(&mut fs, d, pb::LayoutSpec { pool: "none".into(), ..spec() }).unwrap().0.pool,
        ""
    );
    let s = fs.one(Op::Statfs(pb::Statfs { pool: "flash".into(), dir: 0 })).statfs.unwrap();
    assert_eq!((s.total_bytes, s.targets.len()), (2 << 40, 2));
    fs.fails(Op::Statfs(pb::Statfs { pool: "x".into(), dir: 0 }), Code::Inval);
}

#[test]
fn space_is_what_files_can_take() {
    for (nodes, copies, want) in [
        (&[][..], 1, 0),
        (&[5, 7], 1, 12),
        (&[5, 7], 0, 12),
        (&[5, 7], 2, 5),
        (&[10, 10, 10], 2, 15),
        (&[100, 1, 2], 2, 3),
        (&[100, 60, 50], 2, 105),
        (&[100, 60, 50, 0], 3, 50),
        (&[9, 9, 1], 3, 1),
        (&[7], 2, 7),
        (&[u64::MAX, u64::MAX], 1, u64::MAX),
    ] {
        assert_eq!(
            crate::namespace::placement::usable(nodes.to_vec(), copies),
            want,
            "{copies} of {nodes:?}"
        );
    }
    let mut fs = Fs::new();
    let d = fs.mkdir(ROOT, "d");
    let twice = |fs: &mut Fs, ino| {
        let layout = Some(pb::LayoutSpec { copies: 2, ..spec() });
        fs.one(Op::Setlayout(pb::SetLayout { ino, layout }));
    };
    let space = |fs: &mut Fs, dir| {
        let s = fs.one(Op::Statfs(pb::Statfs { pool: String::new(), dir })).statfs.unwrap();
        (s.total_bytes >> 40, s.free_bytes >> 40)
    };
    twice(&mut fs, d);
    assert_eq!(
        [0, ROOT, d, 12345].map(|dir| space(&mut fs, dir)),
        [(6, 6), (6, 6), (3, 3), (6, 6)]
    );
    twice(&mut fs, ROOT);
    assert_eq!(space(&mut fs, 0), (3, 3));
    // All silent: unchanged. A target that was given up does not count, and a draining one has no
    // space for anything new.
    fs.targets(|t| (t.alive, t.used) = (false, 1 << 39));
    assert_eq!(space(&mut fs, ROOT), (3, 1));
    fs.targets(|t| (t.given_up, t.draining) = (t.id == 1, t.id == 2));
    assert_eq!(space(&mut fs, ROOT), (2, 1));
}

#[test]
fn dead_targets_get_no_new_files() {
    let mut fs = Fs::new();
    fs.targets(|t| t.alive = t.id != 2);
    for _ in 0..20 {
        assert!(!targets(&mut fs, pb::LayoutSpec { stripe_count: 2, ..spec() }).contains(&2));
    }
    let s = fs.one(Op::Statfs(pb::Statfs::default())).statfs.unwrap();
    let silent = "one that is silent counts with what it said last";
    assert_eq!(
        (s.total_bytes, s.free_bytes, s.targets.len(), s.targets[2].alive),
        (6 << 40, 6 << 40, 6, false),
        "{silent}"
    );
    // No replica serves: no space at all.
    let map = fs.ns.map();
    let dead = |c: &pb::Chain| {
        let replicas = c.replicas.iter();
        let replicas = replicas
            .map(|r| pb::Replica { state: pb::ReplicaState::ReplicaLastsrv as i32, ..*r })
            .collect();
        pb::Chain { epoch: c.epoch + 1, replicas, ..c.clone() }
    };
    let chains = map.map.chains.iter().map(dead).collect();
    let u = pb::MapUpdate { expect_version: map.version(), chains, ..Default::default() };
    assert_eq!(fs.log(Command::MapUpdate(u)).status, None);
    assert_eq!(create(&mut fs, ROOT, spec()), Err(Code::NoSpc));
    assert_eq!(
        create(&mut fs, ROOT, pb::LayoutSpec { targets: vec![1], ..spec() }),
        Err(Code::NoDev)
    );
}

#[test]
fn equal_space_goes_round_and_unequal_space_by_weight() {
    weighs(Fs::new());
    weighs(Fs::with_chains(1));
}

fn weighs(mut fs: Fs) {
    let count = |fs: &mut Fs, n: usize| {
        let mut hits = vec![0; 6];
        for _ in 0..n {
            for t in targets(fs, pb::LayoutSpec { stripe_count: 2, ..spec() }) {
                hits[t as usize] += 1;
            }
        }
        hits
    };
    fs.targets(|t| t.used = u64::from(t.id) << 34);
    let even = count(&mut fs, 60);
    assert!(even.iter().all(|h| *h == 20), "{even:?}");
    // One target has most of the free space, one none.
    fs.targets(|t| {
        t.used = match t.id {
            0 => 0,
            5 => t.capacity,
            _ => t.capacity / 10 * 9,
        }
    });
    let skewed = count(&mut fs, 200);
    assert!(
        skewed[0] > 180 && skewed[5] == 0 && skewed[1..5].iter().all(|h| *h > 20),
        "{skewed:?}"
    );
}

/// Each target's share of the data is its share of the free space, whatever heads the chains: an
/// empty target gets data at once, a full one none.
#[test]
fn empty_targets_get_more_of_the_copies_too() {
    for copies in [1, 2, 3] {
        let mut fs = Fs::with_chains(8);
        let parts = |fs: &mut Fs| {
            let mut hits = vec![0; 6];
            for _ in 0..600 {
                let chain = chains(fs, pb::LayoutSpec { copies, ..spec() })[0];
                fs.ns
                    .map()
                    .chain(chain)
                    .unwrap()
                    .preferred
                    .iter()
                    .for_each(|t| hits[*t as usize] += 1);
            }
            let all: usize = hits.iter().sum();
            hits.into_iter().map(|n| n * 100 / all).collect::<Vec<_>>()
        };
        // One is empty beside five that are half full: it has 28 % of the space, where an equal
        // share would be 17 %.
        fs.targets(|t| t.used = if t.id == 4 { 0 } else { t.capacity / 2 });
        let some = parts(&mut fs);
        if copies < 3 {
            assert!((25..=32).contains(&some[4]), "{copies} copies: {some:?}");
            assert!(
                (0..6).filter(|t| *t != 4).all(|t| (11..=18).contains(&some[t])),
                "{copies} copies: {some:?}"
            );
        } else {
            // Three nodes: each has a copy, and the chains decide which of its targets has it.
            assert!(some[4] > some[5] && some[4] >= 17, "{some:?}");
        }
        // One is full beside five that are empty.
        fs.targets(|t| t.used = if t.id == 2 { t.capacity } else { 0 });
        let none = parts(&mut fs);
        assert!(none[2] <= 1, "{copies} copies: {none:?}");
    }
}

#[test]
fn a_files_layout_can_change_only_before_it_has_data() {
    let mut fs = Fs::new();
    let made = fs.one(mk_create(ROOT, "f"));
    let f = made.ino;
    fs.one(Op::Release(pb::Release { ino: f, writer: made.writer, surplus: false }));
    let old = fs.record(f).unwrap();
    let set = |n| {
        Op::Setlayout(pb::SetLayout {
            ino: f,
            layout: Some(pb::LayoutSpec { stripe_count: n, ..spec() }),
        })
    };
    let new = fs.one(set(3));
    let layout = new.layout.unwrap();
    assert_eq!((layout.generation, layout.drafts, layout.components[0].chains.len()), (1, 1, 3));
    assert_ne!(layout.components[0].data_id, old.attr.unwrap().data_id);
    assert_eq!(new.attr.unwrap().data_id, layout.components[0].data_id);
    assert_eq!(fs.ns.backlog().gc_queue(9)[0].1.layout, old.layout, "the old name's chunks go");
    fs.as_user(5, |fs| fs.fails(set(2), Code::Access));
    fs.one(mk_size(f, 10));
    fs.one(mk_size(f, 0));
    fs.fails(set(2), Code::Exist);
    fs.fails(Op::Setlayout(pb::SetLayout { ino: f, layout: None }), Code::Inval);
}

/// Gives each target this many chains of each number of copies.
fn deal(fs: &mut Fs, per: usize) {
    let map = fs.ns.map();
    let (chains, sets) = crate::cluster::chain_table::make_chains(&map.map, per).unwrap();
    let u = pb::MapUpdate { expect_version: map.version(), chains, sets, ..Default::default() };
    assert_eq!(fs.log(Command::MapUpdate(u)).status, None);
}

fn chains(fs: &mut Fs, spec: pb::LayoutSpec) -> Vec<u32> {
    let c = create(fs, ROOT, spec).unwrap().0;
    let map = fs.ns.map();
    let layout = pb::Layout { generation: 0, components: vec![c], drafts: 0 };
    StripeMap::resolve(1, &layout, &map).unwrap().chains
}

#[test]
fn files_spread_over_all_chains_of_a_target() {
    let mut fs = Fs::with_chains(8);
    let (mut used, mut heads) = (vec![0; 1000], vec![0; 6]);
    for _ in 0..480 {
        let c = chains(&mut fs, pb::LayoutSpec { copies: 2, ..spec() });
        used[c[0] as usize] += 1;
        heads[fs.ns.map().chain(c[0]).unwrap().ost_index() as usize] += 1;
    }
    let used: Vec<i32> = used.into_iter().filter(|n| *n > 0).collect();
    assert!(used.len() == 48 && used.iter().all(|n| (3..=20).contains(n)), "{used:?}");
    assert!(heads.iter().all(|n| *n == 80), "{heads:?}");
    // A file that uses a target again uses another chain of it.
    for s in [
        pb::LayoutSpec { overstripe: 12, ..spec() },
        pb::LayoutSpec { targets: vec![3; 8], ..spec() },
    ] {
        let c = chains(&mut fs, s);
        assert_eq!(distinct(&c), c.len(), "{c:?}");
    }
    // As wide as several sets, and still small.
    let (c, t) =
        create(&mut fs, ROOT, pb::LayoutSpec { overstripe: 2000, copies: 2, ..spec() }).unwrap();
    assert_eq!((t.len(), distinct(&t), c.chains.len()), (2000, 6, 0));
}

#[test]
fn chains_that_are_whole_are_taken_first() {
    let mut fs = Fs::with_chains(8);
    let map = fs.ns.map();
    let own: Vec<&pb::Chain> =
        map.map.chains.iter().filter(|c| c.preferred.len() == 2 && c.ost_index() == 1).collect();
    assert_eq!(own.len(), 8);
    let degraded = |c: &&pb::Chain| {
        let mut c = pb::Chain { epoch: c.epoch + 1, ..(*c).clone() };
        c.replicas[1].set_state(pb::ReplicaState::ReplicaOffline);
        c
    };
    let update = |fs: &mut Fs, chains: Vec<pb::Chain>| {
        let u =
            pb::MapUpdate { expect_version: fs.ns.map().version(), chains, ..Default::default() };
        assert_eq!(fs.log(Command::MapUpdate(u)).status, None);
    };
    update(&mut fs, own[..7].iter().map(degraded).collect());
    let on_one = pb::LayoutSpec { targets: vec![1], copies: 2, ..spec() };
    for _ in 0..20 {
        assert_eq!(chains(&mut fs, on_one.clone()), [own[7].id]);
    }
    // Where there are none, all that serve.
    update(&mut fs, own[7..].iter().map(degraded).collect());
    let all: Vec<u32> = (0..100).map(|_| chains(&mut fs, on_one.clone())[0]).collect();
    assert_eq!(distinct(&all), 8);
}

#[test]
fn a_pools_files_stay_within_it() {
    let mut fs = Fs::new();
    let flash = |action, targets: Vec<u32>| {
        Command::PoolChange(pb::PoolChange { pool: "flash".into(), action, targets })
    };
    assert_eq!(fs.log(flash(1, vec![1, 3, 4])).status, None);
    let two = pb::LayoutSpec { pool: "flash".into(), copies: 2, ..spec() };
    let members = |fs: &mut Fs, spec: &pb::LayoutSpec| {
        let c = chains(fs, spec.clone())[0];
        fs.ns.map().chain(c).unwrap().preferred.clone()
    };
    // Before it has chains of its own a member heads them.
    assert!((0..20).all(|_| [1, 3, 4].contains(&members(&mut fs, &two)[0])));
    deal(&mut fs, 4);
    for _ in 0..50 {
        assert!(members(&mut fs, &two).iter().all(|t| [1, 3, 4].contains(t)));
    }
    // No other files use them.
    let map = fs.ns.map();
    let own: Vec<u32> =
        map.map.sets.iter().filter(|s| s.pool == "flash").flat_map(|s| s.chains.clone()).collect();
    assert!(
        (0..50).all(|_| !own.contains(&chains(&mut fs, pb::LayoutSpec { copies: 2, ..spec() })[0]))
    );
    // Files stay usable when the pool is removed, and a target outside may be named.
    let f = create(&mut fs, ROOT, two.clone()).unwrap().0;
    let outside = pb::LayoutSpec { targets: vec![0], ..two };
    assert_eq!(targets(&mut fs, outside), [0]);
    assert_eq!(fs.log(flash(3, vec![1, 3, 4])).status, None);
    assert_eq!(fs.log(flash(4, vec![])).status, None);
    assert!(fs.ns.map().chain(f.chains[0]).is_some());
}
