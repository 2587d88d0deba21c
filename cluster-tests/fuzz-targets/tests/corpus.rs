//! Runs every input of the committed corpus through its target, so that all findings of the fuzzer
//! stay fixed.

use std::{
    fs,
    path::Path,
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
};

use strake_fuzz_targets::TARGETS;

/// Counts panics, also those in tasks, which the runtime catches.
static PANICS: AtomicUsize = AtomicUsize::new(0);

#[test]
fn every_input_of_the_corpus_passes() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        PANICS.fetch_add(1, SeqCst);
        report(info);
    }));
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus");
    for (name, run) in TARGETS {
        let mut files: Vec<_> = fs::read_dir(corpus.join(name))
            .unwrap_or_else(|e| panic!("target {name} has no corpus: {e}"))
            .map(|f| f.expect("a readable folder").path())
            .collect();
        files.sort();
        assert!(!files.is_empty(), "the corpus of {name} is empty");
        for f in &files {
            let bytes = fs::read(f).expect("a readable file");
            println!("{name}: {}", f.display());
            run(&bytes);
            assert_eq!(PANICS.load(SeqCst), 0, "{name} panics with {}", f.display());
        }
    }
    for folder in fs::read_dir(&corpus).expect("the corpus") {
        let name = folder.expect("a readable folder").file_name();
        let known = TARGETS.iter().any(|(t, _)| name == *t);
        assert!(known, "a corpus of no target: {}", name.to_string_lossy());
    }
}
