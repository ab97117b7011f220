//! Converts the merged section of a volume or a cache into what is to be served.

use super::parse::{CacheSettings, Located, Origin, VolumeSettings};
use super::{Cache, FlashVolume, NO_CACHE, ReleasedCache, Volume, WAIT_DEFAULT};
use crate::options::layers::{ConfiguredOptions, OptionLayers};
use bcached_control::failure::Failure;
use bcached_format::Uuid;
use bcached_port::FrontendSet;

impl Cache {
    /// Creates the cache; `None` if it is not to be served.
    pub(super) fn of(name: &str, said: CacheSettings) -> Result<Option<Self>, Failure> {
        if name == NO_CACHE {
            return Err(said
                .origin
                .failure("a cache cannot be called `none`")
                .next("choose another name: `none` means no cache"));
        }
        if said.served == Some(false) || said.device.is_none() && said.is_refused {
            return Ok(None);
        }
        let device = required(said.device, &said.origin, &format!("[cache.{name}] has no `device`"))?;
        check_device(&device)?;
        // Without `former` the previous device is dead, and no volume can move away from it: the
        // cache waits for its volumes.
        let is_awaited = said.former.is_none() && said.moving == Some(true);
        let former = said.former.map(|former| (former.value, said.moving.unwrap_or(true)));
        let (name, options) = (Some(name.to_owned()), said.options);
        Ok(Some(Self { name, device: device.value, former, is_awaited, options }))
    }
}

/// Checks that the section of a volume that lives in its cache only has no setting that would be
/// ignored. `[defaults]` are not checked, because they are for other volumes, too. Options that
/// `set` persisted for a former volume with a backing device do not prevent a start.
pub(super) fn sense_of_flash(name: &str, said: &VolumeSettings) -> Result<(), Failure> {
    let Some(flash) = &said.flash else { return Ok(()) };
    let option = said.options.iter().find(|(_, setting)| !setting.origin.is_by_set());
    if let Some((option, setting)) = option {
        let what = format!("`{option}` has no effect in [volume.{name}], which is a flash-only volume");
        return Err(setting
            .origin
            .failure(&what)
            .next("remove it; `bcached set --runtime` sets the options that such a volume has"));
    }
    if said.size.is_some() {
        let what = format!("`size` has no effect in [volume.{name}], which is a flash-only volume");
        return Err(flash.origin.failure(&what).next("remove it"));
    }
    Ok(())
}

impl FlashVolume {
    pub(super) fn of(
        name: String,
        origin: &Origin,
        said: VolumeSettings,
        ways: FrontendSet,
    ) -> Result<Self, Failure> {
        let flash = required(said.flash, origin, &format!("[volume.{name}] has no `flash`"))?;
        if said.backing.is_some() {
            return Err(origin.failure("a volume has either `backing` or `flash`, not both"));
        }
        let uuid = flash.value.strip_prefix("UUID=").and_then(Uuid::from_text).ok_or_else(|| {
            flash
                .origin
                .failure(&format!("`{}` is not the UUID of a volume", flash.value))
                .next("write it as UUID=..")
        })?;
        Ok(Self {
            name,
            uuid,
            served: said.served.unwrap_or(true),
            read_only: said.read_only.unwrap_or(false),
            shared: said.shared.unwrap_or(false),
            ways,
            number: said.number.map(|number| number.value.0),
            wait: said.wait.unwrap_or(WAIT_DEFAULT),
        })
    }
}

impl Volume {
    pub(super) fn plain(place: usize, device: &str, ways: FrontendSet) -> Self {
        Self {
            name: None,
            number: place,
            is_numbered: false,
            backing: device.to_owned(),
            cache: None,
            options: ConfiguredOptions::new(),
            read_only: false,
            shared: false,
            ways,
            wait: WAIT_DEFAULT,
            size: None,
        }
    }
}

/// Checks the options of one volume, each of which may be valid while they contradict each other.
pub(super) fn in_order(options: ConfiguredOptions) -> Result<ConfiguredOptions, Failure> {
    let layers = OptionLayers { configured: options, ..OptionLayers::default() };
    match layers.check() {
        Ok(()) => Ok(layers.configured),
        Err(wrong) => {
            let said = wrong.options.iter().find_map(|name| layers.configured.get(name));
            let setting = said.expect("the defaults fit together, so a file sets one of the two");
            Err(setting.origin.failure(&wrong.what))
        }
    }
}

pub(super) fn required<T>(
    setting: Option<Located<T>>,
    origin: &Origin,
    what: &str,
) -> Result<Located<T>, Failure> {
    setting.ok_or_else(|| origin.failure(what))
}

/// Checks that the device can be searched for: if it is a UUID, that it is valid.
pub(super) fn check_device(device: &Located<String>) -> Result<(), Failure> {
    let uuid = device.value.strip_prefix("UUID=");
    if uuid.is_none_or(|uuid| Uuid::from_text(uuid).is_some()) {
        return Ok(());
    }
    let failure = device.origin.failure(&format!("`{}` is not the UUID of a device", device.value));
    Err(failure
        .next("write the whole UUID, as `bcached show` prints it: UUID=1f5a0c22-2a53-4ae5-9a6f-9f6f5d6b2f10"))
}

/// Checks that the size is in whole sectors. Only the cache knows the block size.
pub(super) fn check_size(name: &str, origin: &Origin, size: Option<u64>) -> Result<(), Failure> {
    if size.is_none_or(|size| size > 0 && size.is_multiple_of(512)) {
        return Ok(());
    }
    let what = format!("`size` of [volume.{name}] is not a positive multiple of 512 bytes");
    Err(origin.failure(&what).next("write a multiple of the cache's block size, such as \"300G\""))
}

pub(super) fn known_cache(
    named: Option<Located<String>>,
    caches: &[Cache],
    released: &[ReleasedCache],
) -> Result<Option<String>, Failure> {
    let Some(named) = named else { return Ok(None) };
    if named.value == NO_CACHE
        || released.iter().any(|released| released.name == named.value)
        || caches.iter().any(|cache| cache.name.as_ref() == Some(&named.value))
    {
        return Ok(Some(named.value));
    }
    let names: Vec<_> = caches.iter().filter_map(|cache| cache.name.as_deref()).collect();
    let failure = named.origin.failure(&format!("there is no cache `{}`", named.value));
    Err(if names.is_empty() {
        failure.next("add a [cache.NAME] section")
    } else {
        failure.next(format!("the caches are: {}", names.join(", ")))
    })
}
