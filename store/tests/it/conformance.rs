//! What every store must do, run on each of them, against a `BTreeMap` as the model.

use std::{collections::BTreeMap, ops::Bound};

use bytes::Bytes;
use rand::{Rng, RngExt, SeedableRng, rngs::StdRng};
use strake_proto::Code;
use strake_store::{Batch, FjallStore, MAX_KEY, MemStore, MetaStore, Reader};

type Model = BTreeMap<Vec<u8>, Vec<u8>>;

fn on_each(test: impl Fn(&dyn MetaStore)) {
    test(&MemStore::new());
    let dir = tempfile::tempdir().unwrap();
    test(&FjallStore::open(dir.path()).unwrap());
}

fn put(s: &dyn MetaStore, k: &[u8], v: &[u8]) {
    let mut b = Batch::default();
    b.put(k.to_vec(), v.to_vec());
    s.commit(b).unwrap();
}

fn contents(
    r: &(impl Reader + ?Sized),
    from: Bound<&[u8]>,
    to: Bound<&[u8]>,
) -> Vec<(Vec<u8>, Vec<u8>)> {
    r.range(from, to).map(|p| p.unwrap()).map(|(k, v)| (k.to_vec(), v.to_vec())).collect()
}

fn whole(r: &(impl Reader + ?Sized)) -> Vec<(Vec<u8>, Vec<u8>)> {
    contents(r, Bound::Unbounded, Bound::Unbounded)
}

fn model_range(m: &Model, from: Bound<&[u8]>, to: Bound<&[u8]>) -> Vec<(Vec<u8>, Vec<u8>)> {
    let inside = |k: &[u8]| {
        (match from {
            Bound::Included(f) => k >= f,
            Bound::Excluded(f) => k > f,
            Bound::Unbounded => true,
        }) && (match to {
            Bound::Included(t) => k <= t,
            Bound::Excluded(t) => k < t,
            Bound::Unbounded => true,
        })
    };
    m.iter().filter(|(k, _)| inside(k)).map(|(k, v)| (k.clone(), v.clone())).collect()
}

#[test]
fn random_histories_match_the_model() {
    on_each(|s| {
        let mut rng = StdRng::seed_from_u64(11);
        let mut model = Model::new();
        let mut views: Vec<(Box<dyn Reader>, Model)> = Vec::new();
        let key = |rng: &mut StdRng| -> Vec<u8> {
            let len = rng.random_range(1..4);
            (0..len).map(|_| [0u8, 1, 7, 0xfe, 0xff][rng.random_range(0..5)]).collect()
        };
        for step in 0..3000u32 {
            let mut b = Batch::default();
            for _ in 0..rng.random_range(1..6) {
                let k = key(&mut rng);
                if rng.random_bool(0.3) {
                    b.delete(k.clone());
                    model.remove(&k);
                } else {
                    let v = (rng.next_u32() % 1000).to_string().into_bytes();
                    b.put(k.clone(), v.clone());
                    model.insert(k, v);
                }
            }
            s.commit(b).unwrap();
            match step % 97 {
                3 => s.sync().unwrap(),
                50 => views.push((s.snapshot().unwrap(), model.clone())),
                60 if views.len() > 3 => drop(views.remove(0)),
                90 if step > 1500 && step < 2000 => {
                    s.clear().unwrap();
                    model.clear();
                }
                _ => {}
            }
            let (a, z) = (key(&mut rng), key(&mut rng));
            assert_eq!(s.get(&a).unwrap().map(|v| v.to_vec()), model.get(&a).cloned());
            for (from, to) in [
                (Bound::Included(&a[..]), Bound::Excluded(&z[..])),
                (Bound::Excluded(&a[..]), Bound::Included(&z[..])),
                (Bound::Excluded(&a[..]), Bound::Excluded(&a[..])),
                (Bound::Included(&a[..]), Bound::Included(&a[..])),
                (Bound::Unbounded, Bound::Excluded(&z[..])),
            ] {
                assert_eq!(contents(s, from, to), model_range(&model, from, to));
            }
            let prefixed: Vec<_> = s.prefix(&a).map(|p| p.unwrap().0.to_vec()).collect();
            assert_eq!(
                prefixed,
                model.keys().filter(|k| k.starts_with(&a)).cloned().collect::<Vec<_>>()
            );
        }
        for (view, was) in &views {
            assert_eq!(whole(&**view), model_range(was, Bound::Unbounded, Bound::Unbounded));
        }
        assert_eq!(whole(s), model_range(&model, Bound::Unbounded, Bound::Unbounded));
    });
}

#[test]
fn a_snapshot_outlives_changes_and_clear() {
    on_each(|s| {
        for i in 0..500u32 {
            put(s, &i.to_be_bytes(), b"old");
        }
        let view = s.snapshot().unwrap();
        for i in 0..500u32 {
            put(s, &i.to_be_bytes(), b"new");
        }
        s.sync().unwrap();
        assert!(whole(&*view).iter().all(|(_, v)| v == b"old"));
        s.clear().unwrap();
        assert_eq!(whole(s).len(), 0);
        put(s, b"k", b"after");
        let old = whole(&*view);
        assert!(old.len() == 500 && old.iter().all(|(_, v)| v == b"old"));
        assert_eq!(view.get(&7u32.to_be_bytes()).unwrap(), Some(Bytes::from_static(b"old")));
        assert_eq!(view.get(b"k").unwrap(), None);
    });
}

#[test]
fn an_iterator_sees_one_state_while_commits_go_on() {
    on_each(|s| {
        for i in 0..300u32 {
            put(s, &i.to_be_bytes(), b"0");
        }
        let mut it = s.range(Bound::Unbounded, Bound::Unbounded);
        let mut seen = vec![it.next().unwrap().unwrap()];
        for i in 0..600u32 {
            put(s, &i.to_be_bytes(), b"1");
        }
        seen.extend(it.map(|p| p.unwrap()));
        assert_eq!(seen.len(), 300);
        assert!(seen.iter().all(|(_, v)| &v[..] == b"0"));
    });
}

#[test]
fn within_a_batch_the_last_operation_on_a_key_counts() {
    on_each(|s| {
        put(s, b"a", b"0");
        let mut b = Batch::default();
        b.put("a", "1");
        b.delete("a");
        b.delete("b");
        b.put("b", "2");
        b.put("c", "3");
        b.put("c", "4");
        s.commit(b).unwrap();
        assert_eq!(whole(s), vec![(b"b".to_vec(), b"2".to_vec()), (b"c".to_vec(), b"4".to_vec())]);
    });
}

#[test]
fn keys_and_values_at_their_limits() {
    on_each(|s| {
        let long = vec![0xffu8; MAX_KEY];
        let big = vec![5u8; 3 << 20];
        put(s, &long, &big);
        put(s, b"\0", b"");
        assert_eq!(s.get(&long).unwrap().unwrap(), big);
        assert_eq!(s.get(b"\0").unwrap().unwrap().len(), 0);
        assert_eq!(s.prefix(&[0xff]).count(), 1);
        for bad in [vec![], vec![0u8; MAX_KEY + 1]] {
            let mut b = Batch::default();
            b.put("good", "1");
            b.put(bad, "1");
            assert_eq!(s.commit(b).unwrap_err().code, Code::Inval);
            assert_eq!(s.get(b"good").unwrap(), None, "no part of a refused batch is visible");
        }
        assert!(s.get(b"").unwrap().is_none());
        s.commit(Batch::default()).unwrap();
        assert!(s.disk_bytes() > 0);
    });
}

#[test]
fn readers_never_see_half_a_batch() {
    on_each(|s| {
        let stop = std::sync::atomic::AtomicBool::new(false);
        let order = std::sync::atomic::Ordering::SeqCst;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(order) {
                    let got = whole(s);
                    assert!(got.windows(2).all(|w| w[0].1 == w[1].1), "{got:?}");
                }
            });
            for i in 0..500u32 {
                let mut b = Batch::default();
                for k in 0..20u8 {
                    b.put(vec![k], i.to_string());
                }
                s.commit(b).unwrap();
            }
            stop.store(true, order);
        });
    });
}
