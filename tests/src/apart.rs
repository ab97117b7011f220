//! Programs that see nothing of a bcached that the machine has itself.

use std::path::Path;
use std::process::Command;

/// Has `command`, which starts a program of ours, find the machine's places in a folder `machine` of `directory`, and nothing in its environment
/// that says where a bcached is. Whatever the caller sets after that holds.
pub fn isolated<'a>(command: &'a mut Command, directory: &Path) -> &'a mut Command {
    for variable in ["CONTROL", "NOTES", "STATE", "SYSFS", "UDEV_RULES", "LOG"] {
        command.env_remove(format!("BCACHED_{variable}"));
    }
    command.env("BCACHED_ROOT", directory.join("machine"))
}
