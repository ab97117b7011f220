use super::*;

fn make(line: &str) -> Result<Vec<(DeviceRole, String)>, Failure> {
    let words: Vec<_> = line.split(' ').map(|word| OsString::from(word.trim_matches('"'))).collect();
    match parse(&words)? {
        Command::Make(make) => Ok(make
            .roles
            .into_iter()
            .map(|(role, path)| (role, path.to_string_lossy().into_owned()))
            .collect()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn roles_follow_the_order_of_the_line() {
    use DeviceRole::{Backing, Cache};
    let expect = |line, devices: &[(DeviceRole, &str)]| {
        let devices: Vec<_> = devices.iter().map(|(role, name)| (*role, (*name).to_owned())).collect();
        assert_eq!(make(line), Ok(devices), "{line}");
    };
    expect("bcached make -C a -B b", &[(Cache, "a"), (Backing, "b")]);
    expect("bcached make -B b c -C a", &[(Backing, "b"), (Backing, "c"), (Cache, "a")]);
    expect("bcached make -C -b 64k a -B b", &[(Cache, "a"), (Backing, "b")]);
    expect("bcached make -B b --cache=a -w 4k c", &[(Backing, "b"), (Cache, "a"), (Cache, "c")]);
    expect("bcached make -B --writeback b", &[(Backing, "b")]);
    expect("bcached make --backing b --backing c", &[(Backing, "b"), (Backing, "c")]);
    expect("bcached make", &[]);
}

#[test]
fn a_device_without_role_or_name_is_refused() {
    let failure = make("bcached make a -C b").expect_err("no role");
    assert_eq!(failure.kind, Kind::Usage);
    assert!(failure.to_string().contains("`a` has no role"), "{failure}");
    let failure = make("bcached make -B b -C \"\"").expect_err("empty");
    assert_eq!(failure.option.as_deref(), Some("--cache"));
}

/// A regression: `help salvage` was an "unrecognized subcommand", though `salvage` says what to do
/// by hand.
#[test]
fn help_for_what_there_is_not_says_so() {
    let refusal = |line: &str| {
        let words: Vec<_> = line.split(' ').map(OsString::from).collect();
        let failure = parse(&words).expect_err(line);
        (failure.kind, failure.to_string())
    };
    let (kind, salvage) = refusal("bcached help salvage");
    assert_eq!((kind, kind.exit()), (Kind::NotInThisVersion, 2));
    assert_eq!(salvage, future_commands::refuse("salvage").to_string());
    assert!(salvage.starts_with("`bcached salvage` is not in this version; until then: "), "{salvage}");
    for (line, sentence) in [
        ("bcached help frob", "there is no command `frob`; `bcached --help` lists the commands"),
        (
            "bcached help config frob",
            "there is no command `config frob`; `bcached config --help` lists the commands",
        ),
        (
            "bcached config frob",
            "there is no command `config frob`; `bcached config --help` lists the commands",
        ),
        (
            "bcached help status frob",
            "`status` has no command `frob`; `bcached status --help` lists its options",
        ),
    ] {
        assert_eq!(refusal(line), (Kind::Usage, sentence.to_owned()), "{line}");
    }
    for line in ["bcached help --json", "bcached --json help status", "bcached help help"] {
        let words: Vec<_> = line.split(' ').map(OsString::from).collect();
        assert!(matches!(parse(&words), Ok(Command::Print(_))), "{line}");
    }
}

#[test]
fn json_is_asked_for_before_the_double_dash_only() {
    let words = |line: &str| line.split(' ').map(OsString::from).collect::<Vec<_>>();
    assert!(wants_json(&words("bcached flush --json")));
    assert!(wants_json(&words("bcached --json show x")));
    assert!(!wants_json(&words("bcached show -- --json")));
}
