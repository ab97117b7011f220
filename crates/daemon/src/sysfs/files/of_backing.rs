//! The directory of a backing device, which is also that of its volume; and that of a flash-only
//! volume.

use super::super::print::{choice, lines, signed_size, size};
use super::{File, FileAction, FileRead, FileWrite, VolumeView};
use bcached_config::options::Scope;
use bcached_config::options::value::ValueKind;

/// What the kernel prints for an unlimited rate, in sectors a second.
const UNLIMITED: u64 = i32::MAX as u64;

const POLICIES: &[&str] = &["all", "meta-only"];
const ON_FAILURE: &[&str] = &["auto", "always"];

/// The files of a backing device.
pub static BACKING: &[File] = &[
    File::deed("attach", FileAction::Attach),
    File::of_member("backing_dev_name", |member| {
        member.volume.hardware.as_ref().map(|(device, _)| device.name.clone()).unwrap_or_default()
    }),
    File::of_member("backing_dev_uuid", |member| member.facts.uuid.clone()),
    File::option(Scope::Volume, "cache_mode"),
    File::deed("clear_stats", FileAction::ClearStats),
    File::deed("detach", FileAction::Detach),
    File::of_member("dirty_data", |member| size(member.facts.dirty.counted())),
    fixed(
        "io_disable",
        ValueKind::Flag,
        |_| "0".to_owned(),
        "use `bcached stop VOLUME` to end service in order",
    ),
    fixed(
        "io_error_limit",
        ValueKind::Number(0, NEVER),
        |_| NEVER.to_string(),
        "a failing disk is not given up: `on_backing_error` decides what happens to requests",
    ),
    File::of_member("io_errors", |member| member.numbers.io_errors.unwrap_or_default().to_string()),
    label(),
    File::of_member("partial_stripes_expensive", |member| {
        let writeback = member.facts.writeback.as_ref();
        u8::from(writeback.is_some_and(|writeback| writeback.partial_stripes_expensive)).to_string()
    }),
    fixed(
        "readahead_cache_policy",
        ValueKind::Choice(POLICIES),
        |_| choice(POLICIES, "all"),
        "read-ahead cannot be told from other reads, and is cached like them",
    ),
    File {
        name: "running",
        read: FileRead::Volume(|_| "1".to_owned()),
        write: FileWrite::Action(FileAction::Run),
    },
    File::option(Scope::Volume, "sequential_cutoff"),
    File::of_member("state", |member| member.facts.backing_state.clone().unwrap_or_default()),
    File::deed("stop", FileAction::Stop),
    fixed(
        "stop_when_cache_set_failed",
        ValueKind::Choice(ON_FAILURE),
        |_| choice(ON_FAILURE, "auto"),
        "nothing is stopped: `on_cache_error` decides what happens to requests",
    ),
    File::of_member("stripe_size", |member| {
        let writeback = member.facts.writeback.as_ref();
        size(writeback.and_then(|writeback| writeback.stripe_bytes).unwrap_or(NO_STRIPES))
    }),
    File::option(Scope::Volume, "writeback_consider_fragment"),
    File::option(Scope::Volume, "writeback_delay"),
    fixed("writeback_metadata", ValueKind::Flag, |_| "1".to_owned(), "it has no effect, as in the kernel"),
    File::option(Scope::Volume, "writeback_percent"),
    File {
        name: "writeback_rate",
        read: FileRead::Volume(|member| size(rate(member))),
        write: FileWrite::Option(Scope::Volume, "writeback_rate"),
    },
    File::of_member("writeback_rate_debug", controller),
    File::option(Scope::Volume, "writeback_rate_fp_term_high"),
    File::option(Scope::Volume, "writeback_rate_fp_term_low"),
    File::option(Scope::Volume, "writeback_rate_fp_term_mid"),
    File::option(Scope::Volume, "writeback_rate_i_term_inverse"),
    File::option(Scope::Volume, "writeback_rate_minimum"),
    File::option(Scope::Volume, "writeback_rate_p_term_inverse"),
    File::option(Scope::Volume, "writeback_rate_update_seconds"),
    File {
        name: "writeback_running",
        read: FileRead::Volume(|member| u8::from(is_written_back(member)).to_string()),
        write: FileWrite::Option(Scope::Volume, "writeback_running"),
    },
];

/// The files of a flash-only volume.
pub static FLASH: &[File] = &[
    label(),
    File {
        name: "size",
        read: FileRead::Volume(|member| size(member.facts.size_bytes)),
        write: FileWrite::Action(FileAction::Resize),
    },
    File::refused(
        "unregister",
        "that would delete all of its data: use `bcached remove`, then `bcached forget`",
    ),
];

/// As many errors as the kernel can count: the limit is never reached.
const NEVER: u64 = i32::MAX as u64;

/// What the kernel prints for a device without stripes, in bytes.
const NO_STRIPES: u64 = 1 << 40;

const fn label() -> File {
    File {
        name: "label",
        read: FileRead::Volume(|member| member.facts.label.clone()),
        write: FileWrite::Option(Scope::Volume, "label"),
    }
}

const fn fixed(
    name: &'static str,
    kind: ValueKind,
    is: fn(&VolumeView<'_>) -> String,
    why: &'static str,
) -> File {
    File { name, read: FileRead::Volume(is), write: FileWrite::Fixed(kind, why) }
}

fn is_written_back(member: &VolumeView<'_>) -> bool {
    member.facts.writeback.as_ref().and_then(|writeback| writeback.writeback_running).unwrap_or(false)
}

/// Returns the write-back rate in bytes a second.
fn rate(member: &VolumeView<'_>) -> u64 {
    let writeback = member.facts.writeback.as_ref().filter(|_| is_written_back(member));
    writeback.map_or(0, |writeback| writeback.writeback_rate_bytes.unwrap_or(UNLIMITED * 512))
}

/// Returns the state of the rate controller.
fn controller(member: &VolumeView<'_>) -> String {
    let runs = is_written_back(member);
    let now = |value: i64| if runs { value } else { 0 };
    let (facts, numbers) = (member.facts, member.numbers);
    let target = facts.writeback.as_ref().map_or(0, |writeback| writeback.dirty_target_bytes);
    let next = if runs { numbers.next_writeback.as_millis() } else { 0 };
    let text = lines(&[
        ("rate", 2, format!("{}/sec", size(rate(member)))),
        ("dirty", 2, size(facts.dirty.counted())),
        ("target", 2, size(target)),
        ("proportional", 1, signed_size(now(numbers.writeback_proportional_bytes))),
        ("integral", 1, signed_size(now(numbers.writeback_integral_bytes))),
        ("change", 2, format!("{}/sec", signed_size(now(numbers.writeback_change_bytes)))),
        ("next io", 1, format!("{next}ms")),
    ]);
    text.trim_end_matches('\n').to_owned()
}
