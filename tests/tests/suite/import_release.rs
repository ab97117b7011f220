//! `bcached import` and `release --register` beside a real kernel: the kernel's bcache runs in the
//! guest, and our daemon takes the set from it with its dirty data and gives it back.

use bcached_tests::failure::Outcome;
use bcached_tests::guest::{self, Job, Machine as _};
use bcached_tests::requires;
use bcached_tests::side::Ours;
use bcached_tests::uml::Uml;

#[test]
fn a_set_goes_from_the_kernel_to_us_and_back_with_its_dirty_data() -> Outcome {
    let Some(uml) = Uml::find() else { return Ok(()) };
    if !requires::programs(&["nbdcopy", "cmp"]) {
        return Ok(());
    }
    let ours = Ours::find()?;
    let images = [tempfile::NamedTempFile::new()?, tempfile::NamedTempFile::new()?];
    for image in &images {
        image.as_file().set_len(64 << 20)?;
    }
    let (fast, tank) = (uml.device(0), uml.device(1));
    let script = format!(
        "bcached={bcached}; export BCACHED_CONTROL=/run/b/control.sock BCACHED_NOTES=/run/b BCACHED_STATE=/run/b
        mkdir -p /run/b
        $bcached make --bucket 64k --cache {fast} --backing {tank} --writeback --label tank > /dev/null
        register {fast} {tank}
        wait_for 20 [ -e /dev/bcache0 ]
        no_bypass 0; keep_dirty 0
        dd if=/dev/urandom of=/run/data bs=1M count=4 2> /dev/null
        dd if=/run/data of=/dev/bcache0 bs=64k oflag=direct 2> /dev/null
        cat /sys/block/bcache0/bcache/state
        set=$(basename $(set_directory))

        echo 'version = 1' > /run/b/config.toml
        $bcached serve --config /run/b/config.toml > /run/b/out 2> /run/b/log & daemon=$!
        wait_for 60 grep -sq ready /run/b/out
        exec 3< /dev/bcache0
        status=0; $bcached import $set 2> /run/b/refused || status=$?
        echo refused $status; grep -c 'bcache0 is in use by' /run/b/refused
        exec 3<&-
        $bcached import $set > /run/b/imported 2>&1 || {{ cat /run/b/imported /run/b/log; exit 1; }}
        nothing_registered
        $bcached list | sed 's/  */ /g' | grep -o 'volume tank served'
        nbdcopy 'nbd+unix:///tank?socket=/run/b/nbd.sock' /run/found
        cmp -n 4194304 /run/data /run/found && echo same here

        $bcached release {fast} --register > /run/b/released 2>&1 || {{ cat /run/b/released /run/b/log; exit 1; }}
        wait_for 20 [ -e /dev/bcache0 ]
        cat /sys/block/bcache0/bcache/state
        cmp -n 4194304 /run/data /dev/bcache0 && echo same there
        kill $daemon; wait $daemon; echo ended $?
        stop_everything",
        bcached = ours.program().display()
    );
    let images = [images[0].path(), images[1].path()];
    let report = uml.run(&Job { images: &images, script: &script, crash_at: None, limit: guest::LIMIT })?;
    let expected =
        ["dirty", "refused 3", "1", "volume tank served", "same here", "dirty", "same there", "ended 0"];
    assert_eq!(report.output, expected, "{report:?}");
    Ok(())
}
