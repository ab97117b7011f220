//! Volumes and caches that are being removed: nothing brings them back before they have gone, and
//! the removal is stored.

use crate::engine_thread::StoppedSet;
use crate::supervisor::caches::CacheEvent;
use crate::supervisor::jobs::precheck::DeviceCheck;
use crate::supervisor::jobs::{Job, JobTarget};
use crate::supervisor::table::{CacheState, VolumeState};
use crate::supervisor::{Event, Supervisor, SupervisorParameters};
use bcached_config::{CommandLine, Config};
use bcached_control::failure::Failure;
use bcached_control::jobs::{JobKind, JobReport, JobSpec, JobState};
use bcached_port::ExportError;
use std::path::Path;

const FILES: &str = "version = 1\n[cache.fast]\ndevice = \"/nonexistent/fast\"\n[volume.one]\nbacking = \"/nonexistent/one\"\n";

/// A supervisor of a configuration with a cache and a volume on it, whose engine is being stopped
/// for a release.
fn releasing(folder: &Path) -> (Supervisor, u64) {
    let files = folder.join("config.toml");
    std::fs::write(&files, FILES).expect("room");
    let line = CommandLine { config: Some(files), ..CommandLine::default() };
    let config = Config::load(&line).expect("it is right");
    let supervisor = Supervisor::new(line, SupervisorParameters::of(config));
    let number = {
        let mut shared = supervisor.shared();
        let thread = std::thread::spawn(|| {});
        shared.table.caches[0].state = CacheState::Ending { thread };
        let volume = &mut shared.table.volumes[0];
        (volume.state, volume.cache) = (VolumeState::Releasing, Some(0));
        let shown = JobReport::new(JobKind::Release, "fast".to_owned(), JobState::Running);
        shared.jobs.add(Job::new(&shown, JobTarget::Cache(0), None))
    };
    (supervisor, number)
}

fn kept(folder: &Path) -> String {
    std::fs::read_to_string(folder.join("config.d/99-set.toml")).unwrap_or_default()
}

/// Regression: a release that ended while the daemon stopped was not stored. The next start took
/// the set again, wherever it was by then.
#[test]
fn a_release_that_ends_in_a_stop_is_kept() {
    let folder = tempfile::tempdir().expect("a folder");
    let (mut supervisor, number) = releasing(folder.path());
    supervisor
        .sender
        .send(Event::Cache(0, CacheEvent::Stopped(StoppedSet { outcome: Ok(()), volumes: Vec::new() })))
        .expect("open");
    supervisor.stop_engines().expect("in order");
    assert!(kept(folder.path()).contains("[cache.fast]\nserved = false"), "{}", kept(folder.path()));
    let shown = crate::supervisor::jobs::api::show(&supervisor.shared, number).expect("it is known");
    assert_eq!(shown.state, JobState::Done);
}

/// Regression: `add` and `import` of what was being released reported that it was there.
#[test]
fn what_is_being_released_is_neither_added_nor_imported() {
    let folder = tempfile::tempdir().expect("a folder");
    let (mut supervisor, number) = releasing(folder.path());
    let refused = |outcome: Result<JobReport, Failure>| {
        let failure = outcome.expect_err("it goes away");
        assert_eq!(failure.kind.exit(), 3, "{failure}");
        assert!(
            failure.to_string().contains(&format!("fast is still being released (job {number})")),
            "{failure}"
        );
    };
    refused(supervisor.add(&JobSpec::new(JobKind::Add, "one".to_owned()), &DeviceCheck::NotYet));
    let (backing, cache) = (Some("/nonexistent/two".to_owned()), Some("fast".to_owned()));
    refused(supervisor.add(
        &JobSpec { backing, cache, ..JobSpec::new(JobKind::Add, "two".to_owned()) },
        &DeviceCheck::NotYet,
    ));
    refused(supervisor.import(&JobSpec::new(JobKind::Import, "fast".to_owned()), DeviceCheck::Nothing));
    refused(
        supervisor
            .plan_job(0, &JobSpec::new(JobKind::Remove, "one".to_owned()))
            .map(|planned| planned.shown()),
    );
    supervisor.reload();
    supervisor.shared().table.caches[0].state = CacheState::Stopped;
    assert!(matches!(supervisor.shared().table.volumes[0].state, VolumeState::Releasing));
    assert_eq!(kept(folder.path()), "");
}

/// Regression: a removed volume was known by name again as soon as another one was added.
#[test]
fn what_was_removed_is_not_named_again() {
    let supervisor = crate::supervisor::tests::supervisor(&["one", "two"]);
    supervisor.name_exports();
    supervisor.gone(0, Some(JobKind::Remove));
    supervisor.name_exports();
    let asked = |name| supervisor.exports.find(name).expect_err("nothing is served");
    assert_eq!(asked("one"), ExportError::Unknown("one".to_owned()));
    assert_eq!(asked(""), ExportError::NotServed("two".to_owned()));
}
