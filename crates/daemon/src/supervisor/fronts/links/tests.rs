use super::*;
use bcached_port::Frontend;
use std::fs;

/// A simulated machine: its `/dev` and its `/sys`.
struct TestMachine {
    folder: tempfile::TempDir,
    places: LinkPaths,
}

impl TestMachine {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let places =
            LinkPaths { directory: folder.path().join("dev/bcache"), system: folder.path().join("sys") };
        for folder in [places.devices(), &places.block()] {
            fs::create_dir_all(folder).expect("a folder");
        }
        Self { folder, places }
    }

    fn device(&self, name: &str) -> PathBuf {
        let device = self.places.devices().join(name);
        fs::write(&device, "").expect("a file");
        device
    }

    fn by(&self, kind: &str, name: &str) -> Option<PathBuf> {
        target(&self.places.directory.join(kind).join(name))
    }

    fn by_uuid(&self, volume: u8) -> Option<PathBuf> {
        self.by("by-uuid", &Uuid([volume; 16]).to_string())
    }

    fn make(&self, export: &Export, device: &Path) {
        make_in(&self.places, export, device).expect("made");
    }

    /// Adds the volume, which asks for that number. Returns what becomes of the number.
    fn come(&self, volume: u8, asks: Option<usize>, device: &Path) -> Option<Result<bool, String>> {
        self.make(&export(volume, ""), device);
        self.look(volume, asks, device)
    }

    fn look(&self, volume: u8, asks: Option<usize>, device: &Path) -> Option<Result<bool, String>> {
        number_in(&self.places, Uuid([volume; 16]), asks, device)
    }

    /// Returns the links called `bcacheN`, and the devices that they lead to.
    fn numbered(&self) -> Vec<(String, Option<PathBuf>)> {
        let entries = fs::read_dir(self.places.devices()).expect("a folder").flatten();
        let named = entries.map(|entry| (entry.file_name().to_string_lossy().into_owned(), entry.path()));
        let numbered = named.filter(|(name, _)| name.starts_with("bcache") && name != "bcache");
        let mut numbered: Vec<_> = numbered.map(|(name, path)| (name, fs::canonicalize(path).ok())).collect();
        numbered.sort();
        numbered
    }
}

fn export(uuid: u8, label: &str) -> Export {
    Export {
        name: "tank".to_owned(),
        uuid: Uuid([uuid; 16]),
        label: label.to_owned(),
        sectors: 8,
        block_sectors: 8,
        read_only: false,
        shared: false,
        frontends: Frontend::Ublk.into(),
        served: None,
    }
}

fn is(name: &str, device: &Path) -> (String, Option<PathBuf>) {
    (name.to_owned(), fs::canonicalize(device).ok())
}

#[test]
fn links_lead_to_their_device_and_go_with_it() {
    let machine = TestMachine::new();
    let [first, second] = ["ublkb0", "ublkb1"].map(|name| machine.device(name));
    let label = || machine.by("by-label", "data");
    machine.make(&export(1, "data"), &first);
    machine.make(&export(2, "data"), &second);
    assert_eq!(machine.by_uuid(1), Some(first.clone()));
    assert_eq!(machine.by_uuid(2), Some(second.clone()));
    assert_eq!(label(), Some(first.clone()), "the first has it");
    // The numbers are different after a boot.
    fs::remove_file(&second).expect("gone");
    machine.make(&export(2, "a/b"), &first);
    assert_eq!((machine.by_uuid(1), label()), (None, None), "it is another's now");
    assert_eq!(machine.by_uuid(2), Some(first.clone()), "a dead link is in nobody's way");
    remove_in(&machine.places, &first);
    assert_eq!(machine.by_uuid(2), None);
    // Devices of the loop driver and of the NBD client exist even when they are unused.
    let [unused, other] = ["nbd4095", "loop4095"].map(|name| machine.device(name));
    machine.make(&export(3, "data"), &unused);
    machine.make(&export(3, "data"), &other);
    let why = "the device that it had before is not its own any more";
    assert_eq!(machine.by_uuid(3), Some(other.clone()), "{why}");
    assert_eq!(label(), Some(other.clone()));
    // The old device is still mounted. Its label may be another volume's, but its UUID is no
    // other's.
    let block = machine.places.block();
    fs::create_dir_all(block.join("loop4095/loop")).expect("a folder");
    fs::write(block.join("loop4095/loop/backing_file"), "").expect("a file");
    machine.make(&export(3, "data"), &unused);
    assert_eq!((machine.by_uuid(3), label()), (Some(unused), Some(other)));
}

#[test]
fn a_number_leads_to_its_volumes_device_and_goes_with_it() {
    let machine = TestMachine::new();
    let [first, second] = ["ublkb0", "ublkb1"].map(|name| machine.device(name));
    assert_eq!(machine.come(1, Some(7), &first), Some(Ok(true)));
    assert_eq!(machine.come(2, None, &second), None, "nobody has asked");
    assert_eq!(machine.numbered(), [is("bcache7", &first)]);
    assert_eq!(machine.look(1, Some(7), &first), Some(Ok(false)), "it is there");
    // The next daemon has another configuration.
    assert_eq!(machine.look(1, Some(8), &first), Some(Ok(true)));
    assert_eq!(machine.look(2, Some(7), &second), Some(Ok(true)));
    assert_eq!(machine.numbered(), [is("bcache7", &second), is("bcache8", &first)]);
    machine.look(2, None, &second);
    remove_in(&machine.places, &first);
    assert_eq!(machine.numbered(), []);
}

/// Links that a killed daemon has left are replaced.
#[test]
fn a_number_that_leads_nowhere_is_in_nobodys_way() {
    let machine = TestMachine::new();
    let [gone, here] = ["ublkb0", "ublkb1"].map(|name| machine.device(name));
    let [nbd, other] = ["nbd3", "nbd4"].map(|name| machine.device(name));
    assert_eq!(machine.come(1, Some(0), &gone), Some(Ok(true)));
    fs::remove_file(&gone).expect("gone");
    assert_eq!(machine.come(2, Some(0), &here), Some(Ok(true)));
    assert_eq!(machine.numbered(), [is("bcache0", &here)]);
    // A device of the NBD client exists and is unused.
    assert_eq!(machine.come(3, Some(1), &nbd), Some(Ok(true)));
    assert_eq!(machine.come(4, Some(1), &other), Some(Ok(true)));
    assert_eq!(machine.numbered(), [is("bcache0", &here), is("bcache1", &other)]);
}

#[test]
fn what_is_called_so_and_is_not_ours_stays() {
    let machine = TestMachine::new();
    let [own, theirs] = ["ublkb0", "sda"].map(|name| machine.device(name));
    let place = |number| machine.places.numbered(number);
    // A node of the kernel, a foreign link, a link that leads nowhere, and one of another daemon.
    fs::write(place(0), "").expect("a file");
    symlink(&theirs, place(1)).expect("a link");
    symlink("/dev/nonexistent", place(2)).expect("a link");
    let other = machine.device("ublkb1");
    assert_eq!(machine.come(9, Some(3), &other), Some(Ok(true)));
    let before = machine.numbered();
    for (number, why) in [
        (
            0,
            "a file that bcached did not make has this name, and is left as it is; remove it, or choose another \
             `number`",
        ),
        (1, "a link to "),
        (2, "a link to /dev/nonexistent that bcached did not make"),
        (3, "it leads to the volume 09090909-0909-0909-0909-090909090909, of another daemon"),
    ] {
        let told = machine.come(1, Some(number), &own).expect("it is there").expect_err("taken");
        assert!(told.starts_with(why), "{told}");
    }
    remove_in(&machine.places, &own);
    assert_eq!(machine.numbered(), before);
    // The link of the volume's UUID may be the kernel's.
    symlink(&theirs, machine.places.of(Uuid([1; 16]))).expect("a link");
    let told = machine.come(1, Some(4), &own).expect("it is there").expect_err("taken");
    assert!(told.contains("leads to another device"), "{told}");
    assert_eq!(machine.numbered(), before);
}

#[test]
fn while_the_kernels_bcache_is_loaded_there_are_no_numbers() {
    for sign in ["module/bcache", "fs/bcache"] {
        let machine = TestMachine::new();
        let sign = machine.folder.path().join("sys").join(sign);
        let device = machine.device("ublkb0");
        assert_eq!(machine.come(1, Some(0), &device), Some(Ok(true)));
        fs::create_dir_all(&sign).expect("a folder");
        let told = machine.look(1, Some(0), &device).expect("it is there").expect_err("refused");
        assert!(told.starts_with("the kernel's bcache is loaded") && told.contains("modprobe -r"), "{told}");
        assert_eq!((machine.numbered(), machine.by_uuid(1)), (Vec::new(), Some(device.clone())));
        assert!(machine.come(1, Some(0), &device).is_some_and(|told| told.is_err()));
        fs::remove_dir(&sign).expect("gone");
        assert_eq!(machine.look(1, Some(0), &device), Some(Ok(true)), "it comes by itself");
        assert_eq!(machine.numbered(), [is("bcache0", &device)]);
    }
}

/// A volume without a by-UUID link gets no number. The reason was logged with the missing link.
#[test]
fn a_number_of_a_volume_that_has_no_link_is_not_made() {
    let machine = TestMachine::new();
    let device = machine.device("ublkb0");
    assert_eq!(machine.look(1, Some(0), &device), None);
    assert_eq!(machine.numbered(), []);
}
