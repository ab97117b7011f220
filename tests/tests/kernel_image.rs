//! Kernel-made images are what they claim to be, by the kernel's own word: the judge is judged first.

use std::error::Error;

use bcached_tests::kernel_image::{CacheMode, Geometry, KernelImage, Scenario, kernel_image};
use bcached_tests::uml::Uml;

/// Makes the image and lets the kernel show that the model is right about it.
fn made(geometry: Geometry, scenario: Scenario) -> Result<Option<KernelImage>, Box<dyn Error>> {
    let Some(uml) = Uml::find() else { return Ok(None) };
    let image = kernel_image(&uml, geometry, scenario)?;
    let contents = image.content_by_kernel(&uml)?;
    for (model, content) in image.models.clone().iter_mut().zip(contents) {
        assert!(model.next_sequence() > 1);
        model.check(std::io::BufReader::new(content))?;
    }
    Ok(Some(image))
}

#[test]
fn a_clean_stop_keeps_dirty_data_in_the_cache() -> Result<(), Box<dyn Error>> {
    let Some(image) = made(Geometry::small(64 << 10, 4096), Scenario::CleanStop)? else { return Ok(()) };
    assert_eq!(image.report.line_after("state "), Some("dirty"));
    assert_eq!(image.models[0].undecided(), 0);
    Ok(())
}

#[test]
fn a_crash_leaves_writes_undecided() -> Result<(), Box<dyn Error>> {
    let Some(image) = made(Geometry::small(512 << 10, 512), Scenario::Crash)? else { return Ok(()) };
    assert!(image.report.last_flush() >= 20);
    assert!(image.models[0].undecided() > 0);
    Ok(())
}

#[test]
fn two_backing_devices_keep_their_own_data() -> Result<(), Box<dyn Error>> {
    let Some(image) = made(Geometry::small(64 << 10, 512), Scenario::TwoBackingsCrash)? else {
        return Ok(());
    };
    assert_eq!(image.models.len(), 2);
    Ok(())
}

#[test]
fn a_flash_only_volume_needs_no_backing_device() -> Result<(), Box<dyn Error>> {
    let Some(image) = made(Geometry::small(512 << 10, 4096), Scenario::FlashOnly)? else { return Ok(()) };
    assert!(image.backings.is_empty());
    Ok(())
}

#[test]
fn small_buckets_make_a_deep_tree() -> Result<(), Box<dyn Error>> {
    let geometry = Geometry { cache_bytes: 128 << 20, ..Geometry::small(8 << 10, 512) };
    let Some(image) = made(geometry, Scenario::DeepTree)? else { return Ok(()) };
    let depth: u64 = image.report.line_after("depth ").ok_or("no depth")?.parse()?;
    assert!(depth >= 2, "{depth}");
    Ok(())
}

#[test]
fn many_small_writes_make_many_sets() -> Result<(), Box<dyn Error>> {
    let Some(image) = made(Geometry::small(512 << 10, 4096), Scenario::ManySets)? else { return Ok(()) };
    eprintln!("{:?}", image.report.output);
    Ok(())
}

#[test]
fn the_journal_goes_round() -> Result<(), Box<dyn Error>> {
    let Some(image) = made(Geometry::small(64 << 10, 512), Scenario::WrappedJournal)? else { return Ok(()) };
    assert!(image.report.last_flush() > 4 * 128);
    Ok(())
}

#[test]
fn generations_go_past_255() -> Result<(), Box<dyn Error>> {
    let geometry = Geometry { mode: CacheMode::Writethrough, ..Geometry::small(8 << 10, 512) };
    let Some(image) = made(geometry, Scenario::Turnovers { turnovers: 270 })? else { return Ok(()) };
    assert!(image.models[0].written_sectors() > 0);
    Ok(())
}
