//! Replays the fuzzer's corpus: conversations that it once found interesting.

use bcached_front_nbd::proto::loopback::converse;
use std::path::Path;

#[test]
fn conversations() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/nbd");
    let mut commands = 0;
    for entry in std::fs::read_dir(&corpus).expect("the corpus is in the repository") {
        let path = entry.expect("a readable folder").path();
        println!("{}", path.display());
        commands += converse(&std::fs::read(&path).expect("a readable file")).commands.len();
    }
    assert!(commands >= 5, "the seeds come as far as requests");
}
