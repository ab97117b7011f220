//! Tests of the harness itself: a guest boots, runs a job, reports, and can be killed.

use std::error::Error;
use std::time::Duration;

use bcached_tests::guest::{self, GuestError, Job, Machine as _};
use bcached_tests::uml::Uml;

#[test]
fn a_job_runs_as_root_and_its_output_and_status_come_back() -> Result<(), Box<dyn Error>> {
    let Some(uml) = Uml::find() else { return Ok(()) };
    let job =
        Job { images: &[], script: "id -u; echo $(ls /sys/fs/bcache)", crash_at: None, limit: guest::LIMIT };
    let report = uml.run(&job)?;
    assert_eq!(report.output, ["0", "pendings_cleanup register register_quiet"], "{report:?}");

    let failed = uml.run(&Job { script: "echo before; false; echo after", ..job });
    let Err(GuestError::Job { status, transcript }) = failed else { panic!("{failed:?}") };
    assert_eq!(status, "1");
    assert!(transcript.contains("before") && !transcript.contains("after"), "{transcript}");
    Ok(())
}

#[test]
fn a_guest_that_takes_too_long_is_killed() {
    let Some(uml) = Uml::find() else { return };
    let job = Job { images: &[], script: "sleep 600", crash_at: None, limit: Duration::from_secs(5) };
    let result = uml.run(&job);
    assert!(matches!(result, Err(GuestError::Limit { .. })), "{result:?}");
}

#[test]
fn a_crash_keeps_what_was_synced_and_loses_what_the_guest_had_not_written() -> Result<(), Box<dyn Error>> {
    let Some(uml) = Uml::find() else { return Ok(()) };
    let image = tempfile::NamedTempFile::new()?;
    image.as_file().set_len(1 << 20)?;
    let script = format!(
        "echo kept | dd of={0} conv=fsync 2>/dev/null
        exec 3<>{0}; echo lost >&3; echo now; sleep 600",
        uml.device(0)
    );
    let images = [image.path()];
    uml.run(&Job { images: &images, script: &script, crash_at: Some("now"), limit: guest::LIMIT })?;
    let bytes = std::fs::read(image.path())?;
    assert_eq!(&bytes[..5], b"kept\n");
    Ok(())
}

#[test]
fn what_the_kernel_logs_comes_back_and_the_job_s_words_are_not_in_it() -> Result<(), Box<dyn Error>> {
    let Some(uml) = Uml::find() else { return Ok(()) };
    let script = "echo something odd > /dev/kmsg; echo job";
    let report = uml.run(&Job { images: &[], script, crash_at: None, limit: guest::LIMIT })?;
    assert_eq!(report.output, ["job"]);
    assert_eq!(report.kernel_log.unexpected(&[]), ["something odd"]);
    Ok(())
}
