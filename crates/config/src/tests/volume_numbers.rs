//! Tests of `number = N`: the numbers that volumes get, and the errors with their locations.

use super::*;

const CACHE: &str = "version = 1\n[cache.a]\ndevice = \"/x\"\n";
const SWAP: &str = "flash = \"UUID=6f0c1a52-2a53-4ae5-9a6f-9f6f5d6b2f10\"\n";

/// Returns the sections as a configuration file, each with a device of its own.
fn text(sections: &[(&str, &str)]) -> String {
    let section = |(name, rest): &(&str, &str)| match rest.starts_with("flash") {
        true => format!("[volume.{name}]\n{rest}"),
        false => format!("[volume.{name}]\nbacking = \"/dev/{name}\"\n{rest}"),
    };
    CACHE.to_owned() + &sections.iter().map(section).collect::<String>()
}

fn numbers(config: &Config) -> Vec<(&str, usize, bool)> {
    let all = config.volumes.iter();
    all.filter_map(|volume| Some((volume.name.as_deref()?, volume.number, volume.is_numbered))).collect()
}

#[test]
fn a_volume_has_the_number_that_it_asks_for() {
    let flash = format!("{SWAP}number = 6\n");
    let sections = [
        ("one", ""),
        ("two", "number = 8191\n"),
        ("off", "served = false\nnumber = 3\n"),
        ("three", ""),
        ("four", "number = 0\n"),
        ("swap", flash.as_str()),
    ];
    let config = load(&text(&sections), &[]).expect("a good file");
    let wanted = [("one", 4, false), ("two", 8191, true), ("three", 2, false), ("four", 0, true)];
    assert_eq!(
        numbers(&config),
        wanted,
        "one and four have changed places, and so have three and what is off"
    );
    assert_eq!((config.flash[0].number, config.places_of_volumes), (Some(6), 5));
    assert_eq!(config.numbers_asked, [0, 3, 6, 8191].into());
    // Any file can set the number; a section added later moves no other volume.
    let more = "version = 1\n[volume.four]\nnumber = 1\n[volume.more]\nbacking = \"/dev/more\"\n";
    let config = load(&text(&sections), &[("10-more.toml", more)]).expect("good files");
    let wanted =
        [("one", 0, false), ("two", 8191, true), ("three", 2, false), ("four", 1, true), ("more", 5, false)];
    assert_eq!(numbers(&config), wanted);
}

#[test]
fn a_number_that_cannot_be_is_refused_where_it_stands() {
    let twice = |rest: &str| text(&[("one", "number = 5\n"), ("two", rest)]);
    let flash = format!("{SWAP}number = 5\n");
    for (text, sentence) in [
        (twice("number = 5\n"), ":9: [volume.two] cannot be bcache5: [volume.one] has that `number` ("),
        (twice("served = false\nnumber = 5\n"), ":10: [volume.two] cannot be bcache5: [volume.one] has"),
        (twice(&flash), ":9: [volume.two] cannot be bcache5: [volume.one] has"),
        (twice("number = 8192\n"), ":9: `8192` is not a volume number: write one from 0 to 8191"),
        (twice("number = -1\n"), ":9: `-1` is not a volume number: write one from 0 to 8191"),
        (twice("number = \"5\"\n"), ":9: invalid type: string \"5\""),
        (
            format!("{CACHE}[defaults]\nnumber = 5\n"),
            ":5: `number` has no effect in [defaults]: each volume has its own number; write it in a [volume.NAME] section",
        ),
    ] {
        let failure = load(&text, &[]).expect_err(&text);
        let whole = failure.to_string();
        let found = whole.split_once("/config.toml").expect("it names the file").1;
        assert_eq!((failure.kind, found.starts_with(sentence)), (Kind::Config, true), "{text}: {found}");
    }
    let failure = load(&twice("number = 5\n"), &[]).expect_err("twice").to_string();
    assert!(failure.ends_with("/config.toml:6); give one of them another number"), "{failure}");
}
