// Buttons and rows that say something when they are chosen, and texts to copy or save.
element.addEventListener('click', async (event) => {
  const copy = event.target.closest('[data-copy]'), save = event.target.closest('[data-save]');
  if (copy || save) {
    const text = event.target.closest('.code').querySelector('pre').textContent;
    if (copy) {
      const done = await navigator.clipboard?.writeText(text).then(() => true, () => false);
      copy.textContent = done ? 'Copied' : 'Select it and press Ctrl+C';
      setTimeout(() => { copy.textContent = 'Copy'; }, 2000);
      return;
    }
    const address = URL.createObjectURL(new Blob([text], { type: 'application/yaml' }));
    for (const [name, data] of Object.entries(JSON.parse(save.dataset.save))) {
      Object.assign(document.createElement('a'), { download: name, href: data ?? address }).click();
    }
    setTimeout(() => URL.revokeObjectURL(address), 1000);
    return;
  }
  const row = event.target.closest('[data-row]') ?? event.target.closest('tbody tr')?.querySelector('[data-row]');
  if (!row) return;
  element.querySelectorAll('[aria-pressed=true]').forEach((other) => other.removeAttribute('aria-pressed'));
  row.setAttribute('aria-pressed', 'true');
  trigger('select', JSON.parse(row.dataset.row));
});
