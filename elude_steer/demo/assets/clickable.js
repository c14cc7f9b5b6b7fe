// Buttons and table rows that send their data to the page when clicked, and texts to copy or save.
element.addEventListener('click', async (event) => {
  const copyButton = event.target.closest('[data-copy]'), saveButton = event.target.closest('[data-save]');
  if (copyButton || saveButton) {
    const text = event.target.closest('.code').querySelector('pre').textContent;
    if (copyButton) {
      const copied = await navigator.clipboard?.writeText(text).then(() => true, () => false);
      copyButton.textContent = copied ? 'Copied' : 'Select the text and press Ctrl+C';
      setTimeout(() => { copyButton.textContent = 'Copy'; }, 2000);
      return;
    }
    const address = URL.createObjectURL(new Blob([text], { type: 'application/yaml' }));
    for (const [name, data] of Object.entries(JSON.parse(saveButton.dataset.save))) {
      Object.assign(document.createElement('a'), { download: name, href: data ?? address }).click();
    }
    setTimeout(() => URL.revokeObjectURL(address), 1000);
    return;
  }
  const row = event.target.closest('[data-row]') ?? event.target.closest('tbody tr')?.querySelector('[data-row]');
  if (!row || window.eludeSteerAgain?.(row)) return;
  element.querySelectorAll('[aria-pressed=true]').forEach((other) => other.removeAttribute('aria-pressed'));
  row.setAttribute('aria-pressed', 'true');
  trigger('select', JSON.parse(row.dataset.row));
});
